"""Packaging of hpm; tool settings and the build back end are in pyproject.toml.

- The library: `pip install .`
- With TensorFlow's CUDA libraries: `pip install '.[gpu]'`
- A checkout to work in: `pip install -e '.[test]'`, which `make test` does for you
"""

from pathlib import Path

from setuptools import find_packages, setup

# Every requirement has a lower bound, the oldest that is meant to work, and an upper one, the next
# release that may break; `requirements_lock.txt` has the versions that were tested.

# Photographs for `python -m hpm.pipelines sample` come from inside these packages.
SAMPLE = ['scikit-image>=0.22,<1', 'scikit-learn>=1.3,<2', 'pillow>=10,<14']
# To write indexed JPEGs and to read them fastest; without the last two TensorFlow reads them.
INDEXED = ['pillow>=10,<14', 'simplejpeg>=1.7,<2', 'opencv-python-headless>=4.8,<6']
# For the charts of `python -m benchmarks.suite`.
REPORT = ['matplotlib>=3.8,<4']

setup(
  name='hpm',
  version='0.1.0',
  description='The performance-critical core of data-parallel image training in TensorFlow 2.',
  long_description=(Path(__file__).parent / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  author='The hpm Authors',
  license_expression='Apache-2.0',
  license_files=['LICENSE'],
  classifiers=[
    'Development Status :: 3 - Alpha',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
  ],
  python_requires='>=3.11',
  # `benchmarks` and `tests` stand beside `hpm` and stay in the checkout.
  packages=find_packages(include=['hpm', 'hpm.*']),
  package_data={'hpm': ['py.typed', 'pipelines/jpeg_native.c']},
  zip_safe=False,
  install_requires=[
    # The full wheel, not tensorflow-cpu: its registry knows the GPU kernels on any machine,
    # so placement can be checked without a GPU.
    'tensorflow>=2.21,<2.22',
    'tensorflow-datasets>=4.9,<5',
    'numpy>=1.26,<3',
    'absl-py>=2,<3',
    'rich>=13,<16',
    # What TensorFlow itself talks by, to ask a tf.data service whether it lives.
    'grpcio>=1.60,<2',
    'protobuf>=5,<8',
  ],
  extras_require={
    'gpu': ['tensorflow[and-cuda]>=2.21,<2.22'],
    # cuda120 because TensorFlow 2.21 pins CUDA 12; this version because its pixels are compared
    # with TensorFlow's. Its plugin for TensorFlow needs an installed TensorFlow to be built, which
    # an extra can't order; `make dali` installs both, or after this extra:
    #   pip install --no-build-isolation nvidia-dali-tf-plugin-cuda120==2.4.0
    # Without the plugin, batches come into TensorFlow through Python.
    'dali': ['nvidia-dali-cuda120==2.4.0'],
    'indexed': INDEXED,
    'report': REPORT,
    # To read `.pth` files, and to hold networks to torchvision's. TensorFlow and torchvision crash
    # in one process; the tests keep them apart, and take another Python, too (TORCH_PYTHON).
    'torch': ['torch>=2.4,<3', 'torchvision>=0.19,<1', 'safetensors>=0.4,<1'],
    'sample': SAMPLE,
    # Fuzzing that follows coverage, in a long test that is skipped without it.
    'fuzz': ['atheris>=3,<4'],
    'test': [
      *SAMPLE,
      *INDEXED,
      *REPORT,
      'pytest>=8,<10',
      'hypothesis>=6.100,<7',
      'build>=1,<2',
      'packaging>=23,<28',
      'setuptools>=77,<100',  # the wheel test builds without a download, from this environment
      'ruff>=0.12,<1',
      'mypy>=1.16,<3',
    ],
  },
)
