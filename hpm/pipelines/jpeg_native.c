/* Batches of images out of JPEGs: what the indexed pipeline does, in one call and without Python.
 *
 * `python -m hpm.pipelines compile` makes a library of it, which hpm/pipelines/jpeg_native.py loads.
 * Every pixel is that of the pipeline's other decoders: windows are decoded with a pixel more on
 * each side, by the accurate DCT and with interpolated chroma, and arithmetic in float follows
 * TensorFlow's kernels (ResizeBilinear, ScaleAndTranslate) operation by operation, so it must be
 * compiled without contracted multiply-adds. What it isn't sure about it declines: files that are
 * no JPEG, CMYK, damaged data. Nothing here trusts a file, or keeps state between calls.
 */
#include <stdio.h>

#include <jpeglib.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

#ifndef LIBJPEG_TURBO_VERSION
#error "libjpeg-turbo is needed: other libraries decode to other pixels"
#endif

enum { DONE = 0, DECLINED = 1, NO_MEMORY = 2 };

typedef struct {
  int top, left, height, width;
} Window;

/* A piece of memory that grows and is used again. */
typedef struct {
  void *data;
  size_t room;
} Buffer;

typedef struct {
  struct jpeg_decompress_struct jpeg;
  struct jpeg_error_mgr errors;
  jmp_buf failed;
  Buffer pixels, cut, lines, places;
} Work;

static void *room_for(Buffer *buffer, size_t size) {
  if (size > buffer->room) {
    free(buffer->data);
    buffer->data = malloc(size);
    buffer->room = buffer->data ? size : 0;
  }
  return buffer->data;
}

static void on_error(j_common_ptr jpeg) {
  longjmp(((Work *)jpeg->client_data)->failed, 1);
}

static void on_message(j_common_ptr jpeg, int level) {
  if (level < 0) jpeg->err->num_warnings++;
}

static void be_silent(j_common_ptr jpeg) { (void)jpeg; }

static int start(Work *work) {
  memset(work, 0, sizeof *work);
  work->jpeg.err = jpeg_std_error(&work->errors);
  work->errors.error_exit = on_error;
  work->errors.emit_message = on_message;
  work->errors.output_message = be_silent;
  work->jpeg.client_data = work;
  if (setjmp(work->failed)) return 0;
  jpeg_create_decompress(&work->jpeg);
  work->jpeg.client_data = work; /* creating clears it in some versions */
  return 1;
}

static void end(Work *work) {
  jpeg_destroy_decompress(&work->jpeg);
  free(work->pixels.data);
  free(work->cut.data);
  free(work->lines.data);
  free(work->places.data);
}

/* The index (docs/indexed_jpeg.md). */

enum { PREFIX_OFFSET = 6, LAYOUT_OFFSET = 18, NUM_FIELDS = 10, LENGTHS_OFFSET = 58, MIN_WIDTH = 5 };
static const unsigned char PREFIX[12] = {'h', 'p', 'm', 'I', 'n', 'd', 'e', 'x', 1, 0, 0, 0};

typedef struct {
  int64_t size, frame, scan, height, width, down, across, rows, columns, reach;
} Layout;

static int has_index(const unsigned char *file, int64_t size, Layout *layout) {
  int64_t fields[NUM_FIELDS];

  if (size <= LENGTHS_OFFSET || memcmp(file + PREFIX_OFFSET, PREFIX, sizeof PREFIX)) return 0;
  for (int i = 0; i < NUM_FIELDS; i++) {
    const unsigned char *at = file + LAYOUT_OFFSET + 4 * i;
    fields[i] = (int32_t)(at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24);
    if (fields[i] < 0) return 0;
  }
  memcpy(layout, fields, sizeof *layout);
  return layout->size == size;
}

/* Whether nothing that the index says leads out of the file. */
static int is_sound(const Layout *at) {
  if (!at->rows || !at->columns || !at->down || !at->across || !at->height || !at->width) return 0;
  if (at->height > 65500 || at->width > 65500 || at->rows > 65535 || at->columns > 65535) return 0;
  if (at->rows * at->down < at->height || at->columns * at->across < at->width) return 0;
  if ((at->rows - 1) * at->down >= at->height || (at->columns - 1) * at->across >= at->width) {
    return 0;
  }
  int64_t header = LENGTHS_OFFSET + 2 * at->rows * at->columns;
  return header <= at->frame && at->frame + 4 <= at->scan && at->scan <= at->size;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The JPEG of the segments that a window touches; moves the window to its place in it. */
static unsigned char *assemble(Work *work, const unsigned char *file, const Layout *at,
                               Window *window, int64_t *size) {
  int64_t beside = at->reach & 1, above = at->reach >> 1 & 1;
  int64_t first = larger(window->left - beside, 0) / at->across;
  int64_t last = smaller((int64_t)window->left + window->width - 1 + beside, at->width - 1) /
                 at->across;
  int64_t covered = smaller((last + 1) * at->across, at->width) - first * at->across;
  if (beside && first && covered < MIN_WIDTH) first--;
  int64_t first_row = larger(window->top - above, 0) / at->down;
  int64_t last_row = smaller((int64_t)window->top + window->height - 1 + above, at->height - 1) /
                     at->down;

  const unsigned char *lengths = file + LENGTHS_OFFSET;
  int64_t header = LENGTHS_OFFSET + 2 * at->rows * at->columns;
  int64_t begin = at->scan, total = 2 + at->scan - header, number = 0;
  /* Two passes: what is copied, and the copying. */
  for (int64_t i = first_row * at->columns; i < (last_row + 1) * at->columns; i++) {
    int64_t column = i % at->columns;
    if (column >= first && column <= last) total += 2 + (lengths[2 * i] | lengths[2 * i + 1] << 8);
  }
  unsigned char *cut = room_for(&work->cut, total), *to = cut;
  if (!cut) return NULL;
  *to++ = 0xFF;
  *to++ = 0xD8;
  memcpy(to, file + header, at->scan - header);
  int64_t top = first_row * at->down, left = first * at->across;
  int64_t height = smaller((last_row + 1) * at->down, at->height) - top;
  int64_t width = smaller((last + 1) * at->across, at->width) - left;
  unsigned char *frame = to + (at->frame - header);
  frame[0] = height >> 8;
  frame[1] = height;
  frame[2] = width >> 8;
  frame[3] = width;
  to += at->scan - header;
  for (int64_t i = 0; i < (last_row + 1) * at->columns; i++) {
    int64_t length = lengths[2 * i] | lengths[2 * i + 1] << 8, column = i % at->columns;
    if (i >= first_row * at->columns && column >= first && column <= last) {
      if (begin + length > at->size) return NULL;
      memcpy(to, file + begin, length);
      to += length;
      *to++ = 0xFF;
      *to++ = 0xD0 + number++ % 8;
    }
    begin += length + 2;
  }
  to[-1] = 0xD9;
  *size = to - cut;
  window->top -= top;
  window->left -= left;
  return cut;
}

/* The pixels of a window, in a buffer of rows of *stride bytes with some room behind the last; NULL
 * if the file is to be declined. One pixel more a side is decoded: at its borders the decoder has
 * no neighbour to interpolate chroma from. */
static unsigned char *decode(Work *work, const unsigned char *file, int64_t size, Window window,
                             size_t *stride) {
  struct jpeg_decompress_struct *jpeg = &work->jpeg;

  if (setjmp(work->failed)) {
    jpeg_abort_decompress(jpeg);
    return NULL;
  }
  work->errors.num_warnings = 0;
  jpeg_mem_src(jpeg, (unsigned char *)file, size);
  jpeg_read_header(jpeg, TRUE);
  int known = jpeg->jpeg_color_space == JCS_YCbCr || jpeg->jpeg_color_space == JCS_GRAYSCALE ||
              jpeg->jpeg_color_space == JCS_RGB;
  int64_t right = (int64_t)window.left + window.width, bottom = (int64_t)window.top + window.height;
  if (!known || window.top < 0 || window.left < 0 || window.height < 1 || window.width < 1 ||
      right > jpeg->image_width || bottom > jpeg->image_height) {
    jpeg_abort_decompress(jpeg);
    return NULL;
  }
  jpeg->out_color_space = JCS_RGB;
  jpeg->dct_method = JDCT_ISLOW;
  jpeg->do_fancy_upsampling = TRUE;
  jpeg_start_decompress(jpeg);
  JDIMENSION first_row = window.top ? window.top - 1 : 0;
  JDIMENSION first = window.left ? window.left - 1 : 0;
  JDIMENSION columns = smaller(right + 1, jpeg->output_width) - first;
  if (columns < jpeg->output_width) jpeg_crop_scanline(jpeg, &first, &columns);
  *stride = (size_t)jpeg->output_width * 3;
  /* Behind the window follows the row that its chroma depends on; the decoder looks at it itself. */
  size_t rows = bottom - first_row;
  unsigned char *pixels = room_for(&work->pixels, *stride * rows + 16);
  if (!pixels) {
    jpeg_abort_decompress(jpeg);
    return NULL;
  }
  if (first_row) jpeg_skip_scanlines(jpeg, first_row);
  for (size_t row = 0; row < rows;) {
    JSAMPROW next[16];
    size_t count = rows - row < 16 ? rows - row : 16;
    for (size_t i = 0; i < count; i++) next[i] = pixels + (row + i) * *stride;
    row += jpeg_read_scanlines(jpeg, next, count);
  }
  int damaged = work->errors.num_warnings != 0;
  jpeg_abort_decompress(jpeg);
  if (damaged) return NULL;
  return pixels + (window.top - first_row) * *stride + ((size_t)window.left - first) * 3;
}

/* Decodes a window of a file with or without an index. */
static unsigned char *window_of(Work *work, const unsigned char *file, int64_t size, Window window,
                                size_t *stride) {
  Layout layout;

  if (size < 4 || file[0] != 0xFF || file[1] != 0xD8 || file[2] != 0xFF ||
      file[size - 2] != 0xFF || file[size - 1] != 0xD9) {
    return NULL;
  }
  if (has_index(file, size, &layout)) {
    if (!is_sound(&layout) || window.top < 0 || window.left < 0 || window.height < 1 ||
        window.width < 1 || (int64_t)window.top + window.height > layout.height ||
        (int64_t)window.left + window.width > layout.width) {
      return NULL;
    }
    file = assemble(work, file, &layout, &window, &size);
    if (!file) return NULL;
  }
  return decode(work, file, size, window, stride);
}

/* Training: bilinear, not antialiased. */

/* Where each of `size` pixels lies between two of `length`, as in TensorFlow's ResizeBilinear with
 * half-pixel centres. */
static void places(int length, int size, int *low, int *high, float *part) {
  float scale = length / (float)size;

  for (int i = 0; i < size; i++) {
    float at = (i + 0.5f) * scale - 0.5f, below = floorf(at);
    low[i] = below > 0 ? (int)below : 0;
    high[i] = ceilf(at) < length - 1 ? (int)ceilf(at) : length - 1;
    if (high[i] < 0) high[i] = 0;
    part[i] = at - below;
  }
}

/* One row of `size` pixels between those of a row of the window, as floats. May write one float
 * more, and reads one byte more than the row has. */
static void across(const unsigned char *row, int size, const int *low, const int *high,
                   const float *part, int flip, float *out) {
  for (int place = 0; place < size; place++) {
    int x = flip ? size - 1 - place : place;
    const unsigned char *a = row + low[x] * 3, *b = row + high[x] * 3;
    float *to = out + place * 3;
#if defined(__SSE4_1__)
    int32_t of_a, of_b;
    memcpy(&of_a, a, 4);
    memcpy(&of_b, b, 4);
    __m128 left = _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(of_a)));
    __m128 right = _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(of_b)));
    __m128 step = _mm_mul_ps(_mm_sub_ps(right, left), _mm_set1_ps(part[x]));
    _mm_storeu_ps(to, _mm_add_ps(left, step));
#else
    for (int c = 0; c < 3; c++) to[c] = a[c] + ((float)b[c] - a[c]) * part[x];
#endif
  }
}

static int resize(Work *work, const unsigned char *pixels, size_t stride, int height, int width,
                  int size, int flip, unsigned char *out) {
  size_t line = (size_t)size * 3;
  float *lines = room_for(&work->lines, (2 * line + 8) * sizeof(float));
  int *x_low = room_for(&work->places, (size_t)size * 6 * sizeof(int));
  if (!lines || !x_low) return NO_MEMORY;
  int *x_high = x_low + size, *y_low = x_low + 2 * size, *y_high = x_low + 3 * size;
  float *x_part = (float *)(x_low + 4 * size), *y_part = (float *)(x_low + 5 * size);
  int held[2] = {-1, -1}; /* the row of the window in each half of `lines` */

  places(width, size, x_low, x_high, x_part);
  places(height, size, y_low, y_high, y_part);
  for (int y = 0; y < size; y++) {
    int wanted[2] = {y_low[y], y_high[y]};
    for (int k = 0; k < 2; k++) {
      int half = wanted[k] & 1;
      if (held[half] == wanted[k]) continue;
      across(pixels + wanted[k] * stride, size, x_low, x_high, x_part, flip,
             lines + half * (line + 4));
      held[half] = wanted[k];
    }
    const float *a = lines + (wanted[0] & 1) * (line + 4);
    const float *b = lines + (wanted[1] & 1) * (line + 4);
    float part = y_part[y];
    unsigned char *to = out + y * line;
    for (size_t i = 0; i < line; i++) {
      /* The sum's last bits are the value, rounded, halves to even. */
      float shifted = (a[i] + (b[i] - a[i]) * part) + 8388608.0f;
      uint32_t bits;
      memcpy(&bits, &shifted, 4);
      to[i] = (unsigned char)bits;
    }
  }
  return DONE;
}

/* Windows of images, resized and some of them mirrored.
 *
 *   count            images
 *   files, sizes     [count], their bytes
 *   windows          [count, 4]: top, left, height, width
 *   flips            [count]: 1 to exchange left and right
 *   size             pixels a side
 *   out              [count, size, size, 3]
 *   declined         [count]: set to 1 where `out` holds nothing
 *
 * Returns 0, or 2 if memory is short.
 */
int hpm_training_images(int count, const unsigned char *const *files, const int64_t *sizes,
                        const int32_t *windows, const int32_t *flips, int size, unsigned char *out,
                        int32_t *declined) {
  Work work;
  int result = DONE;

  if (!start(&work)) return NO_MEMORY;
  for (int i = 0; i < count && result == DONE; i++, windows += 4) {
    Window window = {windows[0], windows[1], windows[2], windows[3]};
    size_t stride;
    unsigned char *pixels = window_of(&work, files[i], sizes[i], window, &stride);
    declined[i] = !pixels;
    if (pixels) {
      result = resize(&work, pixels, stride, window.height, window.width, size, flips[i],
                      out + (size_t)i * size * size * 3);
    }
  }
  end(&work);
  return result;
}

/* The same of windows that are decoded already.
 *
 *   windows          [count], their first pixels; behind the last one's end a byte must be readable
 *   strides          [count], bytes from row to row
 *   sides            [count, 2]: height, width
 */
int hpm_resized_windows(int count, const unsigned char *const *windows, const int64_t *strides,
                        const int32_t *sides, const int32_t *flips, int size, unsigned char *out,
                        int32_t *declined) {
  Work work;
  int result = DONE;

  memset(&work, 0, sizeof work);
  for (int i = 0; i < count && result == DONE; i++) {
    declined[i] = 0;
    result = resize(&work, windows[i], strides[i], sides[2 * i], sides[2 * i + 1], size, flips[i],
                    out + (size_t)i * size * size * 3);
  }
  free(work.lines.data);
  free(work.places.data);
  return result;
}

/* Evaluation: antialiased, as TensorFlow's ScaleAndTranslate with a triangle. */

typedef struct {
  int *starts, *reaches; /* [size]: the first pixel of a span, and how many have a weight */
  float *weights;        /* [size, span] */
  int span;
} Spans;

static int clamped(float at, int length) {
  return at < 0 ? 0 : at > length - 1 ? length - 1 : (int)at;
}

static int spans_of(Buffer *buffer, int length, int size, float scale, float translation,
                    Spans *spans) {
  float inverse = 1.0f / scale, inverse_translation = -inverse * translation;
  float kernel = inverse > 1.0f ? inverse : 1.0f, one_over_kernel = 1.0f / kernel;

  spans->span = (int)smaller(2 * (int64_t)ceilf(kernel) + 1, length);
  size_t bytes = (size_t)size * (2 * sizeof(int) + spans->span * sizeof(float));
  spans->starts = room_for(buffer, bytes);
  if (!spans->starts) return NO_MEMORY;
  memset(spans->starts, 0, bytes);
  spans->reaches = spans->starts + size;
  spans->weights = (float *)(spans->reaches + size);
  for (int x = 0; x < size; x++) {
    float at = (x + 0.5f) * inverse + inverse_translation, sum = 0;
    spans->reaches[x] = 1;
    if (at < 0 || at > length) continue;
    int begin = clamped(ceilf(at - kernel - 0.5f), length);
    int past = clamped(floorf(at + kernel - 0.5f), length) + 1;
    float *weights = spans->weights + (size_t)x * spans->span;
    for (int source = begin; source < past; source++) {
      float distance = fabsf((source + 0.5f - at) * one_over_kernel);
      weights[source - begin] = distance < 1.0f ? 1.0f - distance : 0.0f;
      sum += weights[source - begin];
    }
    float one_over_sum = 1.0f / sum;
    for (int i = 0; i < past - begin; i++) weights[i] *= one_over_sum;
    spans->starts[x] = begin;
    int reach = spans->span;
    while (reach > 1 && weights[reach - 1] == 0.0f) reach--;
    spans->reaches[x] = reach;
  }
  return DONE;
}

static int shape_of(Work *work, const unsigned char *file, int64_t size, int *height, int *width) {
  Layout layout;

  if (has_index(file, size, &layout)) {
    *height = layout.height;
    *width = layout.width;
    return is_sound(&layout);
  }
  if (setjmp(work->failed)) {
    jpeg_abort_decompress(&work->jpeg);
    return 0;
  }
  jpeg_mem_src(&work->jpeg, (unsigned char *)file, size);
  jpeg_read_header(&work->jpeg, TRUE);
  *height = work->jpeg.image_height;
  *width = work->jpeg.image_width;
  jpeg_abort_decompress(&work->jpeg);
  return 1;
}

static int evaluation_image(Work *work, Buffer *of_rows, Buffer *of_columns,
                            const unsigned char *file, int64_t bytes, int size, int short_side,
                            unsigned char *out) {
  int height, width;
  Spans rows, columns;
  size_t stride;

  if (bytes < 4 || file[0] != 0xFF || file[1] != 0xD8 || file[2] != 0xFF) return DECLINED;
  if (!shape_of(work, file, bytes, &height, &width)) return DECLINED;
  float ratio = short_side / (float)(height < width ? height : width);
  int resized_height = (int)rintf(height * ratio), resized_width = (int)rintf(width * ratio);
  int top = (resized_height - size) / 2, left = (resized_width - size) / 2;
  if (spans_of(of_rows, height, size, resized_height / (float)height, -(float)top, &rows) ||
      spans_of(of_columns, width, size, resized_width / (float)width, -(float)left, &columns)) {
    return NO_MEMORY;
  }
  int first_row = rows.starts[0], first = columns.starts[0], past_row = 0, past = 0;
  for (int i = 0; i < size; i++) {
    first_row = (int)smaller(first_row, rows.starts[i]);
    first = (int)smaller(first, columns.starts[i]);
    past_row = (int)larger(past_row, rows.starts[i] + rows.reaches[i]);
    past = (int)larger(past, columns.starts[i] + columns.reaches[i]);
  }
  Window window = {first_row, first, past_row - first_row, past - first};
  unsigned char *pixels = window_of(work, file, bytes, window, &stride);
  if (!pixels) return DECLINED;
  size_t line = (size_t)window.width * 3;
  float *sums = room_for(&work->lines, (line + 4) * sizeof(float));
  if (!sums) return NO_MEMORY;
  for (int y = 0; y < size; y++) {
    memset(sums, 0, line * sizeof(float));
    for (int i = 0; i < rows.reaches[y]; i++) {
      const unsigned char *row = pixels + (size_t)(rows.starts[y] + i - first_row) * stride;
      float weight = rows.weights[(size_t)y * rows.span + i];
      for (size_t k = 0; k < line; k++) sums[k] += row[k] * weight;
    }
    unsigned char *to = out + (size_t)y * size * 3;
    for (int x = 0; x < size; x++, to += 3) {
      const float *from = sums + (size_t)(columns.starts[x] - first) * 3;
      const float *weights = columns.weights + (size_t)x * columns.span;
      int reach = columns.reaches[x];
#if defined(__SSE4_1__)
      __m128 all = _mm_setzero_ps();
      for (int i = 0; i < reach; i++) {
        all = _mm_add_ps(all, _mm_mul_ps(_mm_loadu_ps(from + 3 * i), _mm_set1_ps(weights[i])));
      }
      all = _mm_min_ps(_mm_add_ps(all, _mm_set1_ps(0.5f)), _mm_set1_ps(255.0f));
      __m128i levels = _mm_cvttps_epi32(_mm_max_ps(all, _mm_setzero_ps()));
      levels = _mm_packus_epi16(_mm_packus_epi32(levels, levels), levels);
      int32_t pixel = _mm_cvtsi128_si32(levels);
      memcpy(to, &pixel, 3);
#else
      float sum[3] = {0, 0, 0};
      for (int i = 0; i < reach; i++) {
        for (int c = 0; c < 3; c++) sum[c] += from[3 * i + c] * weights[i];
      }
      for (int c = 0; c < 3; c++) {
        float value = sum[c] + 0.5f;
        to[c] = value > 255.0f ? 255 : value < 0.0f ? 0 : (unsigned char)value;
      }
#endif
    }
  }
  return DONE;
}

/* The middles of images whose short side becomes `short_side`, antialiased.
 *
 *   out   [count, size, size, 3]; the rest as for hpm_training_images
 */
int hpm_evaluation_images(int count, const unsigned char *const *files, const int64_t *sizes,
                          int size, int short_side, unsigned char *out, int32_t *declined) {
  Work work;
  Buffer of_rows = {0}, of_columns = {0};
  int result = DONE;

  if (!start(&work)) return NO_MEMORY;
  for (int i = 0; i < count && result != NO_MEMORY; i++) {
    result = evaluation_image(&work, &of_rows, &of_columns, files[i], sizes[i], size, short_side,
                              out + (size_t)i * size * size * 3);
    declined[i] = result == DECLINED;
  }
  end(&work);
  free(of_rows.data);
  free(of_columns.data);
  return result == NO_MEMORY ? NO_MEMORY : DONE;
}
