"""Re-codes a JPEG without loss: the same coefficients, with a restart marker every few MCUs.

Done by libjpeg-turbo, as it lies inside Pillow's wheel or on the system, through ctypes. The
structures below are those of its API version 6.2, which libjpeg-turbo keeps; the library itself
refuses another version or other sizes of them.

libjpeg reports an error by a function that may not return, and Python can't jump out of it. So an
error ends the process (`on_error` is called first), and `transcode` belongs into a process of its
own: `jpeg_recoder` has it.
"""

from collections.abc import Callable, Iterable
import ctypes
import ctypes.util
import functools
import glob
import importlib.util
import math
import os
from typing import Any

from hpm.errors import DataError

__all__ = ['interval', 'load', 'transcode']

_VERSION = 62
# Pixels of a segment's width. Narrower ones save no time that can be measured, and cost bytes.
_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 64, 16, 96

_INT, _UINT, _LONG, _BYTE = ctypes.c_int, ctypes.c_uint, ctypes.c_long, ctypes.c_ubyte
_SHORT, _DOUBLE, _POINTER = ctypes.c_ushort, ctypes.c_double, ctypes.c_void_p


def _fields(text: str) -> list[tuple[str, Any]]:
  """ctypes fields from 'type: name name[n] ...; type: ...'."""
  types: dict[str, Any] = {
    'int': _INT,
    'uint': _UINT,
    'long': _LONG,
    'byte': _BYTE,
    'short': _SHORT,
    'double': _DOUBLE,
    'ptr': _POINTER,
  }
  fields: list[tuple[str, Any]] = []
  for group in text.split(';'):
    kind, _, names = group.partition(':')
    for name in names.split():
      name, _, count = name.rstrip(']').partition('[')
      base = types[kind.strip()]
      fields.append((name, base * int(count) if count else base))
  return fields


_COMMON = 'ptr: err mem progress client_data; int: is_decompressor global_state'
_TABLES = 'byte: arith_dc_L[16] arith_dc_U[16] arith_ac_K[16]'
_SCAN = """
  int: comps_in_scan; ptr: cur_comp_info[4]; uint: MCUs_per_row MCU_rows_in_scan;
  int: blocks_in_MCU MCU_membership[10] Ss Se Ah Al
"""


class _Error(ctypes.Structure):
  _fields_ = _fields("""
    ptr: error_exit emit_message output_message format_message reset_error_mgr;
    int: msg_code msg_parm[20] trace_level; long: num_warnings; ptr: jpeg_message_table;
    int: last_jpeg_message; ptr: addon_message_table; int: first_addon_message last_addon_message
  """)


class _Component(ctypes.Structure):
  _fields_ = _fields("""
    int: component_id component_index h_samp_factor v_samp_factor quant_tbl_no dc_tbl_no ac_tbl_no;
    uint: width_in_blocks height_in_blocks; int: DCT_scaled_size;
    uint: downsampled_width downsampled_height; int: component_needed MCU_width MCU_height
      MCU_blocks MCU_sample_width last_col_width last_row_height; ptr: quant_table dct_table
  """)


class _Decompress(ctypes.Structure):
  _fields_ = _fields(
    f"""{_COMMON}; ptr: src; uint: image_width image_height; int: num_components jpeg_color_space
    out_color_space; uint: scale_num scale_denom; double: output_gamma; int: buffered_image
    raw_data_out dct_method do_fancy_upsampling do_block_smoothing quantize_colors dither_mode
    two_pass_quantize desired_number_of_colors enable_1pass_quant enable_external_quant
    enable_2pass_quant; uint: output_width output_height; int: out_color_components
    output_components rec_outbuf_height actual_number_of_colors; ptr: colormap;
    uint: output_scanline; int: input_scan_number; uint: input_iMCU_row; int: output_scan_number;
    uint: output_iMCU_row; ptr: coef_bits quant_tbl_ptrs[4] dc_huff_tbl_ptrs[4]
    ac_huff_tbl_ptrs[4]; int: data_precision; ptr: comp_info; int: progressive_mode arith_code;
    {_TABLES}; uint: restart_interval; int: saw_JFIF_marker; byte: JFIF_major_version
    JFIF_minor_version density_unit; short: X_density Y_density; int: saw_Adobe_marker;
    byte: Adobe_transform; int: CCIR601_sampling; ptr: marker_list; int: max_h_samp_factor
    max_v_samp_factor min_DCT_scaled_size; uint: total_iMCU_rows; ptr: sample_range_limit;
    {_SCAN} unread_marker; ptr: master main coef post inputctl marker entropy idct upsample
    cconvert cquantize"""
  )


class _Compress(ctypes.Structure):
  _fields_ = _fields(
    f"""{_COMMON}; ptr: dest; uint: image_width image_height; int: input_components
    in_color_space; double: input_gamma; int: data_precision num_components jpeg_color_space;
    ptr: comp_info quant_tbl_ptrs[4] dc_huff_tbl_ptrs[4] ac_huff_tbl_ptrs[4]; {_TABLES};
    int: num_scans; ptr: scan_info; int: raw_data_in arith_code optimize_coding CCIR601_sampling
    smoothing_factor dct_method; uint: restart_interval; int: restart_in_rows write_JFIF_header;
    byte: JFIF_major_version JFIF_minor_version density_unit; short: X_density Y_density;
    int: write_Adobe_marker; uint: next_scanline; int: progressive_mode max_h_samp_factor
    max_v_samp_factor; uint: total_iMCU_rows; {_SCAN}; ptr: master main prep coef marker cconvert
    downsample fdct entropy script_space; int: script_space_size"""
  )


_ON_ERROR = ctypes.CFUNCTYPE(None, _POINTER)
_FORMAT = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_char_p)


@functools.cache
def load() -> ctypes.CDLL:
  """libjpeg-turbo: Pillow's own, or the system's.

  Raises:
    DataError: there is neither.
  """
  for path in _candidates():
    try:
      library = ctypes.CDLL(path)
    except OSError:
      continue
    if hasattr(library, 'jpeg_write_coefficients') and hasattr(library, 'jpeg_mem_dest'):
      for name in ('jpeg_CreateDecompress', 'jpeg_CreateCompress'):
        getattr(library, name).argtypes = [_POINTER, _INT, ctypes.c_size_t]
      library.jpeg_std_error.restype = _POINTER
      library.jpeg_read_coefficients.restype = ctypes.POINTER(_POINTER)
      return library
  raise DataError(
    'no libjpeg-turbo found to re-code JPEGs with: pip install pillow (its wheel carries one)'
  )


def _candidates() -> Iterable[str]:
  """Where libjpeg-turbo may be, best first."""
  spec = importlib.util.find_spec('PIL')
  for root in (spec and spec.submodule_search_locations) or ():
    for below in ('../pillow.libs/libjpeg*', '../Pillow.libs/libjpeg*', '.dylibs/libjpeg*'):
      yield from sorted(glob.glob(os.path.join(root, below)))
  name = ctypes.util.find_library('jpeg')
  if name:
    yield name


def interval(num_mcus: int, mcu_width: int, num_rows: int, max_segments: int) -> int:
  """MCUs a segment: a divisor of the row, near 64 pixels, or the whole row if there is none.

  Args:
    num_mcus: in a row.
    mcu_width: pixels.
    num_rows: of MCUs.
    max_segments: of the image.
  """
  if num_mcus * mcu_width <= _MAX_WIDTH:
    return num_mcus
  sizes = [
    size
    for size in range(-(-_MIN_WIDTH // mcu_width), _MAX_WIDTH // mcu_width + 1)
    if num_mcus % size == 0 and num_mcus // size * num_rows <= max_segments
  ]
  # 48 and 85 pixels are equally far from 64.
  return min(sizes, key=lambda size: abs(math.log(size * mcu_width / _WIDTH)), default=num_mcus)


def transcode(
  jpeg: bytes, on_error: Callable[[str], None], *, max_segments: int, optimize: bool = True
) -> bytes:
  """The same coefficients as sequential, Huffman-coded JPEG with restart markers.

  They stand about every 64 pixels, at the same places of each row of MCUs. EXIF, colour profiles,
  comments and thumbnails are left out; the markers that decide on colour (JFIF's and Adobe's) stay.

  Args:
    jpeg: any JPEG of 8 bits a sample.
    on_error: is called with libjpeg's message, and then the process ends with code 1.
    max_segments: between markers.
    optimize: Huffman tables for this image: some 3 % smaller, and half as fast.

  Raises:
    DataError: libjpeg warned of damaged data, or the samples have not 8 bits.
  """
  library = load()
  error = _Error()
  library.jpeg_std_error(ctypes.byref(error))

  @_ON_ERROR
  def error_exit(context: int) -> None:
    message = ctypes.create_string_buffer(200)
    _FORMAT(error.format_message)(context, message)
    on_error(message.value.decode(errors='replace'))
    os._exit(1)

  @_ON_ERROR
  def silent(context: int) -> None:
    pass

  error.error_exit = ctypes.cast(error_exit, _POINTER).value
  error.output_message = ctypes.cast(silent, _POINTER).value
  source, target = _Decompress(), _Compress()
  source.err = target.err = ctypes.addressof(error)
  library.jpeg_CreateDecompress(ctypes.byref(source), _VERSION, ctypes.sizeof(source))
  library.jpeg_CreateCompress(ctypes.byref(target), _VERSION, ctypes.sizeof(target))
  output, size = _POINTER(), ctypes.c_ulong()
  try:
    library.jpeg_mem_src(ctypes.byref(source), jpeg, ctypes.c_ulong(len(jpeg)))
    library.jpeg_read_header(ctypes.byref(source), 1)
    if source.data_precision != 8:
      raise DataError(f'{source.data_precision} bits a sample, not 8')
    arrays = library.jpeg_read_coefficients(ctypes.byref(source))
    if error.num_warnings:
      raise DataError(f'libjpeg gave {error.num_warnings} warnings of damaged data')
    library.jpeg_mem_dest(ctypes.byref(target), ctypes.byref(output), ctypes.byref(size))
    library.jpeg_copy_critical_parameters(ctypes.byref(source), ctypes.byref(target))
    # As the source has them, since decoders guess colours from what is there and what is not.
    target.write_JFIF_header = source.saw_JFIF_marker
    target.write_Adobe_marker = source.saw_Adobe_marker
    target.optimize_coding = int(optimize)
    target.restart_interval = _interval_of(source, max_segments)
    library.jpeg_write_coefficients(ctypes.byref(target), arrays)
    library.jpeg_finish_compress(ctypes.byref(target))
    library.jpeg_finish_decompress(ctypes.byref(source))
    return ctypes.string_at(output, size.value)
  finally:
    library.jpeg_destroy_compress(ctypes.byref(target))
    library.jpeg_destroy_decompress(ctypes.byref(source))
    if output:
      ctypes.CDLL(None).free(output)


def _components(source: _Decompress) -> list[_Component]:
  return list((_Component * source.num_components).from_address(source.comp_info))


def _interval_of(source: _Decompress, max_segments: int) -> int:
  """MCUs a segment of an image whose header has been read."""
  parts = _components(source)
  across, down = 8, 8
  if len(parts) > 1:  # one component is never interleaved: its MCU is a block
    across *= max(part.h_samp_factor for part in parts)
    down *= max(part.v_samp_factor for part in parts)
  num_mcus, num_rows = -(-source.image_width // across), -(-source.image_height // down)
  return interval(num_mcus, across, num_rows, max_segments)
