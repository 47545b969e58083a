"""The photographs that the corpus is cut from, and where they come from."""

from pathlib import Path
import shutil
import subprocess
import tempfile

from hpm.errors import DataError

__all__ = ['PACKAGES', 'PHOTOGRAPHS', 'download', 'installed']

# Debian package -> its directory of photographs, and those that are used.
PACKAGES = {
  'lomiri-wallpapers-16.04': (
    'usr/share/backgrounds',
    (
      'Bridge_by_Sander_Klootwijk.jpg',
      'Dragonfly_by_Bolly.jpg',
      'Picture_0B_by_freespace.jpg',
      'Picture_1A_by_freespace.jpg',
      'Wine_by_Jakkub_Mede.jpg',
      'aitzgorri_by_Aitzol_Berasategi.jpg',
      'free_by_Peter_Nerlich.jpg',
      'friends_by_Aitzol_Berasategi.jpg',
      'greentock_by_Peter_Nerlich.jpg',
      'life_by_Aitzol_Berasategi.jpg',
      'picosdeeuropa_by_Aitzol_Berasategi.jpg',
      'seeding_by_Clements_Engelhardt.jpg',
      'sunset_by_Aitzol_Berasategi.jpg',
    ),
  ),
  'lomiri-wallpapers-20.04': ('usr/share/backgrounds', ('Kleiber_by_Lukas_Baubkus.jpg',)),
  'mate-backgrounds': (
    'usr/share/backgrounds/mate/nature',
    (
      'Aqua.jpg',
      'Blinds.jpg',
      'Dune.jpg',
      'Garden.jpg',
      'GreenMeadow.jpg',
      'LadyBird.jpg',
      'RainDrops.jpg',
      'Storm.jpg',
      'TwoWings.jpg',
      'Wood.jpg',
      'YellowFlower.jpg',
    ),
  ),
  'plasma-workspace-wallpapers': (
    'usr/share/wallpapers',
    (
      'BytheWater/contents/images/2560x1600.jpg',
      'ColdRipple/contents/images/2560x1600.jpg',
      'ColorfulCups/contents/images/2560x1600.jpg',
      'EveningGlow/contents/images/2560x1600.jpg',
      'FallenLeaf/contents/images/2560x1600.jpg',
      'Grey/contents/images/2560x1600.jpg',
      'Kite/contents/images/2560x1600.jpg',
      'OneStandsOut/contents/images/2560x1600.jpg',
      'Path/contents/images/2560x1600.jpg',
      'summer_1am/contents/images/2560x1600.jpg',
      'Volna/contents/images/5120x2880.jpg',
    ),
  ),
}

# Python package -> its directory of photographs, and those that are used.
PHOTOGRAPHS = {
  'skimage': (
    'data',
    ('astronaut.png', 'coffee.png', 'chelsea.png', 'rocket.jpg', 'motorcycle_left.png'),
  ),
  'sklearn': ('datasets/images', ('china.jpg', 'flower.jpg')),
}


def download(directory: Path) -> list[Path]:
  """The photographs of the Debian packages, unpacked below `directory`.

  Raises:
    DataError: no apt-get or dpkg, or they fail.
  """
  for program in ('apt-get', 'dpkg'):
    if not shutil.which(program):
      raise DataError(
        f'the corpus is cut from photographs in Debian packages, and there is no {program}: build '
        'it on Debian or Ubuntu, and copy it'
      )
  with tempfile.TemporaryDirectory() as below:
    _run(['apt-get', 'update', '-qq'], below)
    _run(['apt-get', 'download', '-qq', *PACKAGES], below)
    for package in PACKAGES:
      (archive,) = Path(below).glob(f'{package}_*.deb')
      _run(['dpkg', '-x', str(archive), str(directory / package)], below)
  return [
    directory / package / below / name
    for package, (below, names) in PACKAGES.items()
    for name in names
  ]


def _run(command: list[str], directory: str) -> None:
  done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
  if done.returncode:
    lines = done.stderr.strip().splitlines() or ['no message']
    raise DataError(f'{" ".join(command[:2])} failed ({lines[-1]}): run it as root, or with sudo')


def installed() -> list[Path]:
  """The photographs inside the Python packages."""
  import importlib.util

  found = []
  for package, (below, names) in PHOTOGRAPHS.items():
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
      raise DataError(f'the corpus needs photographs of {package}: make test installs it')
    found += [Path(spec.submodule_search_locations[0]) / below / name for name in names]
  return found
