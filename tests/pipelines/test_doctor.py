"""The doctor finds what is wrong and ends with a code by severity; the sheet shows it."""

import json
import os
import shutil

import numpy as np
from PIL import Image
import pytest

from hpm import errors
from hpm.pipelines import __main__ as command_line
from hpm.pipelines import doctor, indexed_jpeg, jpeg_recoder, records, show
from tests.pipelines import data
from tests.pipelines.test_sources import write_cifar, write_folder


def examine(directory, source='imagenet', **options) -> doctor.Report:
  return doctor.examine(
    source, options={'data_dir': str(directory)}, **({'num_workers': 1} | options)
  )


def whats(report: doctor.Report, severity: str) -> list[str]:
  return [finding.what for finding in report.findings if finding.severity == severity]


def write(directory, contents, split='train') -> str:
  """Shards whose images all differ."""
  return data.write_shards(directory, contents, split)


def different(index: int, **options) -> bytes:
  return data.record(data.image_bytes(40 + index, 30), **options)


def test_a_good_data_set_gets_a_table_and_code_0(sample_dir, tmp_path, capsys):
  out = str(tmp_path / 'report.json')
  arguments = ['doctor', sample_dir, '--decode', '--num_classes=7', '--workers=2', f'--json={out}']
  assert command_line.main(arguments) == 0
  text = capsys.readouterr().out
  assert 'train: 64 images in 8 files' in text and 'validation: 16 images in 2 files' in text
  assert '1 to 7, 7 different; label_offset=-1' in text
  assert text.splitlines()[-1] == '0 things wrong, 0 odd'
  with open(out) as file:
    report = json.load(file)
  assert report['severity'] == 'ok'
  train = report['splits']['train']
  assert train['num_images'] == 64 and sum(train['labels'].values()) == 64
  assert sum(train['kinds'].values()) == 64 and set(train['files'].values()) == {8}
  assert train['num_bytes'] > 64 * 10_000


def test_damaged_records_are_named_with_file_record_and_offset(tmp_path):
  directory = write(tmp_path, [[different(8 * s + i) for i in range(8)] for s in range(3)])
  paths = records.shard_files(directory, 'train')
  starts = records.record_offsets(paths[0])
  data.flip_byte(paths[0], int(starts[3]) + 200)
  end = int(records.record_offsets(paths[1])[6])
  os.truncate(paths[1], end + 50)
  open(paths[2], 'wb').close()
  report = examine(directory)
  assert whats(report, 'wrong') == [
    f'{paths[0]}: record 3 (at byte {starts[3]}) is damaged: the checksum of its data is wrong; '
    'copy or write this shard again',
    f'{paths[1]}: the file ends inside record 6 (at byte {end}): copy or write this shard again',
    f'{paths[2]} is empty (0 bytes)',
  ]
  assert report.severity == 'wrong'
  assert report.splits['train'].files == {paths[0]: 7, paths[1]: 6}


def test_what_a_pipeline_would_stop_at_is_wrong(tmp_path, capsys):
  directory = write(
    tmp_path,
    [
      [
        different(0),
        different(1, label=0, filename='zero.JPEG'),
        data.record(b'', filename='none.JPEG'),
        data.record(label=None),
        data.record(b'text', filename='text.JPEG'),
        data.record(data.image_bytes()[:800], filename='half.JPEG'),
      ]
    ],
  )
  found = whats(examine(directory), 'wrong')
  assert [line.split(': record ')[1].split(':')[0] for line in found] == ['1', '2', '3', '4']
  assert 'label 0 of image zero.JPEG' in found[0] and 'none.JPEG has 0 bytes' in found[1]
  assert 'no single value for image/class/label' in found[2]
  assert 'text.JPEG of 4 bytes cannot be decoded' in found[3]
  # Half an image has a whole header, so it takes decoding.
  assert 'half.JPEG' in whats(examine(directory, decode=True), 'wrong')[4]
  assert command_line.main(['doctor', directory]) == 1
  assert 'wrong: ' in capsys.readouterr().out


def test_what_training_survives_is_odd(tmp_path, capsys):
  twin = different(50, label=5)
  contents = [different(i) for i in range(12)] + [twin, twin]
  directory = write(tmp_path, [contents])
  report = examine(directory, num_workers=4)
  assert whats(report, 'wrong') == []
  odd = whats(report, 'odd')
  path = f'{directory}/train-00000-of-00001'
  assert f'{path}: record 13: the same image as {path}: record 12' in odd
  assert any("1 file for 4 workers: share by record (shard_by='record')" in o for o in odd)
  assert any('3 labels between 1 and 5 have no image' in o for o in odd)
  assert command_line.main(['doctor', directory]) == 3
  many = [different(i) for i in range(22)] + [different(30, label=2), different(31, label=2)]
  assert any(
    'classes have between 2 and 22 images' in odd
    for odd in whats(examine(write(tmp_path / 'c', [many])), 'odd')
  )


def test_of_two_equal_images_the_first_in_the_files_order_is_the_original(tmp_path):
  twin = different(50)
  slow = [different(i) for i in range(30)]  # its twin is met long before it by another thread
  directory = write(tmp_path, [[*slow, twin], [twin], [twin]])
  originals = [line.split('same image as ')[1] for line in whats(examine(directory), 'odd')]
  assert originals == [f'{directory}/train-00000-of-00003: record 30'] * 2


def test_splits_are_compared(tmp_path):
  write(tmp_path, [[different(0), different(1, label=2)]])
  write(tmp_path, [[different(0), different(3, label=9)]], 'validation')
  found = whats(examine(tmp_path), 'wrong')
  same = f'{tmp_path}/validation-00000-of-00001: record 0: the same image as {tmp_path}/train-0000'
  assert any(line.startswith(same) for line in found)
  assert any('1 labels are in validation and not in train, such as 9' in line for line in found)
  fit = whats(examine(tmp_path, num_classes=5), 'wrong')
  assert any('label 9 of image' in line and 'outside 0..4' in line for line in fit)


def test_index_files_are_checked(tmp_path):
  directory = write(tmp_path, [[different(0)], [different(1)]])
  assert command_line.main(['index', directory]) == 0
  assert whats(examine(directory), 'wrong') == []
  first, second = sorted(os.listdir(tmp_path / 'idx'))
  shutil.copy(tmp_path / 'idx' / first, tmp_path / 'idx' / second)
  (wrong,) = whats(examine(directory), 'wrong')
  assert second in wrong


def test_kinds_are_those_that_pillow_sees():
  exif = Image.Exif()
  exif[0x0112] = 6
  images = {
    'JPEG RGB': data.image_bytes(),
    'JPEG L': data.image_bytes(mode='L'),
    'JPEG CMYK': data.image_bytes(mode='CMYK'),
    'JPEG RGB progressive': data.image_bytes(progressive=True),
    'JPEG RGB with EXIF rotation': data.image_bytes(exif=exif),
    'PNG RGB': data.image_bytes(form='PNG'),
  }
  for kind, image in images.items():
    assert doctor._kind_by_pillow(image)[0] == kind
    assert doctor._kind(image) == doctor._kind_by_pillow(image)
  plain = data.image_bytes(
    48, 32, comment=b'x' * 300, restart_marker_rows=1, icc_profile=bytes(100)
  )
  assert doctor._plain_jpeg(plain) == doctor._kind_by_pillow(plain)  # Pillow isn't asked
  for size in range(len(plain)):  # what ends within its header isn't judged by it
    assert doctor._plain_jpeg(plain[:size]) in (None, ('JPEG RGB', (48, 32)))
  assert doctor._plain_jpeg(plain[:60]) is None


def test_an_index_that_is_not_that_of_its_segments_is_wrong(tmp_path):
  with jpeg_recoder.Recoder() as recoder:
    good, _ = recoder.recode(data.image_bytes(300, 200))
  where = indexed_jpeg.LENGTHS_OFFSET
  bad = good[:where] + bytes([good[where] ^ 1]) + good[where + 1 :]
  directory = write(tmp_path, [[data.record(good, filename='a'), data.record(bad, filename='b')]])
  report = examine(directory, decode=True)
  assert report.splits['train'].kinds == {'JPEG RGB indexed': 2}
  (what,) = whats(report, 'wrong')
  assert 'record 1: the index of image b is not that of its segments' in what


def test_what_is_no_image_has_no_size(tmp_path):
  directory = write(tmp_path, [[different(0), data.record(b'no image')]])
  report = examine(directory)
  assert report.splits['train'].sides == [(40, 30)]
  assert '40 x 30 on average, 40 x 30 to 40 x 30' in doctor.table(report)


@pytest.mark.parametrize('flag', ['--num_classes=0', '--num_classes=-1', '--workers=0'])
def test_numbers_below_1_are_refused(tmp_path, capsys, flag):
  directory = write(tmp_path, [[different(0)]])
  assert command_line.main(['doctor', directory, flag]) == 2
  assert f'{flag.split("=")[1]} must be at least 1' in capsys.readouterr().err


def test_folders_and_cifar_are_read_as_well(tmp_path):
  images = [data.image_bytes(30 + i, 40, form='PNG' if i == 4 else 'JPEG') for i in range(9)]
  directory = write_folder(tmp_path / 'f', images)
  with open(os.path.join(directory, 'train', 'n1', '004.JPEG'), 'wb') as file:
    file.write(b'broken')
  report = examine(directory, 'folder')
  (wrong,) = whats(report, 'wrong')
  assert 'n1/004.JPEG: image 004.JPEG of 6 bytes cannot be decoded' in wrong
  assert report.splits['train'].kinds == {'JPEG RGB': 8, 'unknown': 1}
  cifar = write_cifar(tmp_path / 'c', 2, ['train.bin', 'test.bin'])
  report = examine(cifar, 'cifar100')
  assert {name: sum(split.files.values()) for name, split in report.splits.items()} == {
    'train': 7,
    'validation': 7,
  }


def test_a_directory_of_nothing_is_an_error(tmp_path, capsys):
  assert command_line.main(['doctor', str(tmp_path)]) == 1
  assert 'holds no TFRecords' in capsys.readouterr().err


def test_the_contact_sheet_shows_originals_boxes_and_views(sample_dir, tmp_path, capsys):
  out = str(tmp_path / 'sheet.png')
  arguments = ['show', sample_dir, f'--out={out}', '--num_images=6', '--num_views=3']
  assert command_line.main([*arguments, '--image_size=64', '--use_bbox']) == 0
  with Image.open(out) as image:
    pixels = np.asarray(image.convert('RGB'))
  assert pixels.shape == (6 * (64 + 28 + 8) + 8, 4 * 72 + 8, 3)
  assert ((pixels == show._COLOR).all(-1)).sum() > 20  # boxes
  columns = [pixels[36:100, 80 + 72 * i : 144 + 72 * i] for i in range(3)]
  assert all(column.std() > 5 for column in columns)
  assert not np.array_equal(columns[0], columns[1])
  assert command_line.main([*arguments[:2], '--out=x.nonsense', '--num_images=1']) == 2
  assert 'x.nonsense' in capsys.readouterr().err


def test_views_begin_with_what_the_first_epoch_sees(sample_dir):
  from hpm import pipelines

  options = {'data_dir': sample_dir, 'batch_size': 8, 'image_size': 16, 'num_classes': 7}
  pipeline = pipelines.create('imagenet', with_ids=True, shuffle_buffer=16, **options)
  expected, labels, ids = data.collect(pipeline, 1)
  for i, (views, label, ident) in enumerate(pipeline.views(3).take(8)):
    assert views.shape == (3, 16, 16, 3)
    np.testing.assert_array_equal(views[0], expected[i])
    assert (label, ident) == (labels[i], ids[i])
    assert not np.array_equal(views[1], views[2])


def test_a_sheet_of_a_damaged_shard_names_the_record(sample_dir, tmp_path, capsys):
  directory = shutil.copytree(sample_dir, tmp_path / 'damaged')
  path = str(directory / 'train-00000-of-00008')
  data.flip_byte(path, int(records.record_offsets(path)[1]) + 300)
  assert command_line.main(['show', str(directory), f'--out={tmp_path}/sheet.png']) == 1
  assert capsys.readouterr().err.count('\n') == 1


def test_a_sheet_of_evaluation_has_one_view(sample_dir):
  drawn = show.sheet(
    'imagenet',
    options={'data_dir': sample_dir, 'split': 'validation'},
    num_images=2,
    image_size=64,
    training=False,
  )
  assert drawn.size == (2 * 72 + 8, 2 * 100 + 8)
  with pytest.raises(errors.UsageError, match='num_images=0'):
    show.sheet('imagenet', options={'data_dir': sample_dir}, num_images=0)
