/* What libjpeg-turbo allows: a training transform in a loop, with nothing around it.
 *
 *   cc -O3 -march=native jpeg_loop.c -o jpeg_loop -ljpeg      (Debian: libjpeg62-turbo-dev)
 *   jpeg_loop LIST SECONDS SIZE
 *
 * LIST has a line an image: top left height width flip path. Of each file the window is decoded (the
 * accurate DCT, interpolated chroma; rows above and columns beside it are skipped as far as
 * libjpeg-turbo can), resized bilinearly to SIZE x SIZE bytes of RGB, and mirrored if flip is 1. Files
 * lie in memory. Printed are the images, seconds and CPU seconds of whole passes over the list, as
 * many as take SECONDS, after one pass that isn't counted.
 */
#include <stdio.h>

#include <jpeglib.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
  unsigned char *bytes;
  unsigned long size;
  int top, left, height, width, flip;
} Image;

static double seconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static void *need(void *pointer, const char *what) {
  if (!pointer) {
    perror(what);
    exit(1);
  }
  return pointer;
}

/* Decodes at least the window; says where it begins in the result, and how long a row is. */
static unsigned char *decode(const Image *image, int *left, int *stride) {
  static unsigned char *buffer;
  static size_t room;
  struct jpeg_decompress_struct jpeg;
  struct jpeg_error_mgr errors;
  JDIMENSION first = image->left, width = image->width;

  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, image->bytes, image->size);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = JCS_RGB;
  jpeg.dct_method = JDCT_ISLOW;
  jpeg.do_fancy_upsampling = TRUE;
  jpeg_start_decompress(&jpeg);
  if (width < jpeg.output_width) jpeg_crop_scanline(&jpeg, &first, &width);
  if (image->top) jpeg_skip_scanlines(&jpeg, image->top);
  *left = image->left - (int)first;
  *stride = (int)width * 3;
  if ((size_t)*stride * image->height > room) {
    room = (size_t)*stride * image->height;
    buffer = need(realloc(buffer, room), "memory");
  }
  for (int row = 0; row < image->height;) {
    JSAMPROW rows[8];
    int count = image->height - row < 8 ? image->height - row : 8;
    for (int i = 0; i < count; i++) rows[i] = buffer + (size_t)(row + i) * *stride;
    int read = jpeg_read_scanlines(&jpeg, rows, count);
    if (!read) exit(1); /* the window isn't inside the image */
    row += read;
  }
  jpeg_abort_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  return buffer;
}

/* Where each of `size` pixels lies between two of `length`: half-pixel centres. */
static void places(int length, int size, int *low, int *high, float *part) {
  for (int i = 0; i < size; i++) {
    float at = (i + 0.5f) * ((float)length / size) - 0.5f;
    int floor_at = (int)floorf(at);
    low[i] = floor_at < 0 ? 0 : floor_at;
    high[i] = floor_at + 1 < length ? floor_at + 1 : length - 1;
    part[i] = at - floor_at;
  }
}

static void resize(const unsigned char *pixels, int stride, const Image *image, int size,
                   unsigned char *out) {
  int x_low[size], x_high[size], y_low[size], y_high[size];
  float x_part[size], y_part[size];
  static float *lines;
  int held[2] = {-1, -1}; /* the source row in each half of `lines` */

  if (!lines) lines = need(malloc(sizeof(float) * size * 6), "memory");
  places(image->width, size, x_low, x_high, x_part);
  places(image->height, size, y_low, y_high, y_part);
  for (int y = 0; y < size; y++) {
    int wanted[2] = {y_low[y], y_high[y]};
    for (int k = 0; k < 2; k++) {
      int half = wanted[k] & 1;
      if (held[half] == wanted[k]) continue;
      const unsigned char *row = pixels + (size_t)wanted[k] * stride;
      float *line = lines + half * size * 3;
      for (int x = 0; x < size; x++) {
        const unsigned char *a = row + x_low[x] * 3, *b = row + x_high[x] * 3;
        float *to = line + (image->flip ? size - 1 - x : x) * 3;
        for (int c = 0; c < 3; c++) to[c] = a[c] + (b[c] - a[c]) * x_part[x];
      }
      held[half] = wanted[k];
    }
    const float *a = lines + (wanted[0] & 1) * size * 3, *b = lines + (wanted[1] & 1) * size * 3;
    unsigned char *to = out + (size_t)y * size * 3;
    for (int i = 0; i < size * 3; i++) to[i] = (unsigned char)(a[i] + (b[i] - a[i]) * y_part[y] + 0.5f);
  }
}

int main(int count, char **arguments) {
  if (count != 4) {
    fprintf(stderr, "usage: jpeg_loop LIST SECONDS SIZE\n");
    return 2;
  }
  FILE *list = need(fopen(arguments[1], "r"), arguments[1]);
  double limit = atof(arguments[2]);
  int size = atoi(arguments[3]), total = 0, left, stride;
  Image *images = NULL, next;
  char path[4096];

  while (fscanf(list, "%d %d %d %d %d %4095[^\n]", &next.top, &next.left, &next.height, &next.width,
                &next.flip, path) == 6) {
    FILE *file = need(fopen(path + strspn(path, " "), "rb"), path);
    fseek(file, 0, SEEK_END);
    next.size = ftell(file);
    rewind(file);
    next.bytes = need(malloc(next.size), "memory");
    if (fread(next.bytes, 1, next.size, file) != next.size) return 1;
    fclose(file);
    images = need(realloc(images, sizeof(Image) * (total + 1)), "memory");
    images[total++] = next;
  }
  if (!total || size < 1) return 1;

  unsigned char *out = need(malloc((size_t)size * size * 3), "memory");
  unsigned long done = 0;
  double wall = 0, cpu = 0;
  for (int pass = 0; pass == 0 || seconds(CLOCK_MONOTONIC) - wall < limit || pass == 1; pass++) {
    if (pass == 1) {
      wall = seconds(CLOCK_MONOTONIC);
      cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    }
    for (int i = 0; i < total; i++) {
      unsigned char *pixels = decode(images + i, &left, &stride);
      resize(pixels + left * 3, stride, images + i, size, out);
    }
    if (pass) done += total;
  }
  printf("%lu %.6f %.6f\n", done, seconds(CLOCK_MONOTONIC) - wall,
         seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
  return 0;
}
