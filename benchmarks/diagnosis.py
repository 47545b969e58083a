"""What limits a run, from the time that each of its parts takes alone. Pure arithmetic.

Parts work at the same time where they don't share anything: reading from storage, decoding on the
host, copying to devices, the step on the devices. So a step takes as long as the slowest of them.
On CPU devices decoding and the step share the cores, and their times add. The step itself is
computing, then what of the aggregation backprop doesn't hide, then what the host needs between two
steps; these add as well.

A part limits the run by what would be gained without it. Behind it comes the part that would limit
then.
"""

from collections.abc import Mapping, Sequence
import dataclasses

__all__ = ['ADVICE', 'PARTS', 'Times', 'Verdict', 'verdict']

PARTS = ('storage', 'decode', 'transfer', 'compute', 'communication', 'host')
# Part -> what to try.
ADVICE = {
  'storage': 'a faster disk, more shards to read at once, or fewer bytes '
  '(python -m hpm.pipelines convert)',
  'decode': '--pipeline=indexed after python -m hpm.pipelines convert SRC OUT --format=indexed, '
  'raw shards, or --data_service',
  'transfer': '--pipeline=raw with smaller images, or a larger --batch_size',
  'compute': '--precision=fp16 or bf16 and --xla on GPUs, or more devices (--num_gpus)',
  'communication': 'another --all_reduce_spec, --gradient_repacking=8, '
  '--compact_gradient_transfer, or a larger --batch_size',
  'host': '--steps_per_call=10, or a larger --batch_size',
}
_LIKE = 0.05  # gains this near to one another are one verdict
_LITTLE = 0.05  # a gain below is none
_SHARED = 0.25  # of the cores' time, from which both sides count

Seconds = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds a step, for all devices together.

  Attributes:
    parts: of `PARTS`, each alone; what is not there costs nothing.
    shared: whether decoding and computing share cores, as on CPU devices.
  """

  parts: Seconds
  shared: bool = False

  def step(self, without: Sequence[str] = ()) -> float:
    """What a step takes, if some parts took no time."""
    took = {name: 0.0 if name in without else self.parts.get(name, 0.0) for name in PARTS}
    step = took['compute'] + took['communication'] + took['host']
    busy = took['decode'] + step if self.shared else max(took['decode'], step)
    return max(took['storage'], took['transfer'], busy)

  def gains(self, without: Sequence[str] = ()) -> dict[str, float]:
    """Part -> share of speed that is gained without it, some others gone; largest first."""
    before = self.step(without)
    left = [name for name in PARTS if self.parts.get(name, 0.0) > 0 and name not in without]
    after = {name: self.step((*without, name)) for name in left}
    found = {name: before / time - 1 if time else float('inf') for name, time in after.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What limits a run.

  Attributes:
    limit: one of `PARTS`; 'contention' where decoding and the step take the cores from each other.
    gain: share of speed that a run without it would gain; of contention, on cores of its own.
    alike: parts that limit as much, within a twentieth.
    behind: what would limit next, and the gain after that.
    sentence: all of it, with what to try.
  """

  limit: str
  gain: float
  alike: tuple[str, ...]
  behind: str
  behind_gain: float
  sentence: str


def verdict(times: Times) -> Verdict:
  """The verdict on these times.

  Args:
    times: at least one part takes time.
  """
  gains = times.gains()
  limit, gain = next(iter(gains.items()))
  alike = tuple(n for n, g in gains.items() if n != limit and gain - g <= _LIKE and g > _LITTLE)
  contended = _contention(times)
  if contended is not None and limit in ('decode', 'compute', 'communication', 'host'):
    limit, gain, alike = 'contention', contended, ()
    gone: tuple[str, ...] = ('decode',)
  else:
    gone = (limit,)
  if gain <= _LITTLE:  # two or more that run side by side end together
    level = _level(times)
    alike = tuple(name for name in level if name != limit)
    gone = tuple(level) or gone
  rest = times.gains(gone)
  behind, behind_gain = next(iter(rest.items()), ('', 0.0))
  return Verdict(
    limit,
    gain,
    alike,
    behind,
    behind_gain,
    _sentence(times, limit, gain, alike, gone, behind),
  )


def _contention(times: Times) -> float | None:
  """The gain of a step that had cores of its own, if both sides want much of the same ones."""
  if not times.shared:
    return None
  decode = times.parts.get('decode', 0.0)
  step = times.step(('storage', 'transfer', 'decode'))
  together = decode + step
  if not together or min(decode, step) < _SHARED * together:
    return None
  if times.parts.get('storage', 0.0) > together:
    return None
  apart = max(decode, step, times.parts.get('storage', 0.0), times.parts.get('transfer', 0.0))
  return times.step() / apart - 1


def _level(times: Times) -> list[str]:
  """Parts beside one another that all take as long as a step does."""
  whole = times.step()
  step = times.step(('storage', 'transfer', 'decode'))
  sides = {name: times.parts.get(name, 0.0) for name in ('storage', 'decode', 'transfer')}
  sides['compute'] = step
  if times.shared:
    sides['compute'] += sides.pop('decode')
  return [name for name, time in sides.items() if time >= (1 - _LIKE) * whole]


def _sentence(
  times: Times,
  limit: str,
  gain: float,
  alike: Sequence[str],
  gone: Sequence[str],
  behind: str,
) -> str:
  if limit == 'contention':
    decode = times.parts['decode']
    share = decode / (decode + times.step(('storage', 'transfer', 'decode')))
    text = (
      f'Input and step take the cores from each other: {share:.0%} of their time goes to decoding. '
      f'With cores of its own the input would leave the run {gain:.0%} faster'
    )
    tries = f'{ADVICE["decode"]}; more cores'
  elif alike:
    names = ' and '.join([limit, *alike])
    text = f'{names[0].upper()}{names[1:]} limit this run alike'
    if gain > _LITTLE:
      text += f': without either it would be about {gain:.0%} faster'
    else:
      text += ': none of them alone makes it faster'
    tries = '; '.join(f'for {name}: {ADVICE[name]}' for name in (limit, *alike))
  else:
    text = f'{limit[0].upper()}{limit[1:]} limits this run'
    text += (
      f': without it, it would be {gain:.0%} faster' if gain < 10 else ': it is nearly all of it'
    )
    tries = ADVICE[limit]
  if behind and times.step(gone):
    text += f', and then {behind} would limit it'
  return f'{text}. Try {tries}'
