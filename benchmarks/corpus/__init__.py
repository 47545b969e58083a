"""The corpus of JPEGs that input is measured on: ImageNet's sizes, cut from real photographs.

  python -m benchmarks.corpus OUT            # 1,000 images, 2 minutes, 211 MB

It gives OUT/train/CLASS/*.JPEG and the same images as TFRecords, OUT/tfrecord/train-*-of-*. The
photographs are those of four Debian packages, which apt-get downloads, and of scikit-image and
scikit-learn. The same options give the same images, and with the same Pillow the same bytes.

Sizes follow ImageNet's: most have a long side of 500, some are small, few are large (mean 487 x
428); 4:2:0 and 4:4:4; sensor grain, without which photographs that were shrunk compress too well
(109 KB in the mean).
"""
