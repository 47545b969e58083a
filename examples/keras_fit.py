"""A plain Keras model trained by `model.fit` on hpm's input pipeline.

python -m hpm.pipelines sample --out .data/sample
python examples/keras_fit.py .data/sample
"""

import sys

import keras

import hpm


def main(data_dir: str) -> None:
  pipeline = hpm.pipelines.create('imagenet', data_dir=data_dir, batch_size=16, image_size=64)
  model = keras.Sequential(
    [
      hpm.pipelines.Normalize(),  # uint8 to float, on the device
      keras.layers.Conv2D(32, 3, strides=2, activation='relu'),
      keras.layers.Conv2D(64, 3, strides=2, activation='relu'),
      keras.layers.GlobalAveragePooling2D(),
      keras.layers.Dense(pipeline.num_classes),
    ]
  )
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile('adam', loss, metrics=['accuracy'])
  model.fit(pipeline.dataset(), steps_per_epoch=pipeline.epoch_size // 16, epochs=2, verbose=2)


if __name__ == '__main__':
  main(sys.argv[1])
