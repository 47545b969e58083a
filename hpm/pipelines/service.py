"""Batches made by other machines: a tf.data service decodes, this process receives.

    pipelines.create(
      'imagenet', data_dir='DIR', batch_size=64, pipeline='service', service='10.0.0.7:5050'
    )

For training whose processors can't decode fast enough: the service's workers read the same files
(by the same path) and send uint8 batches. Each of them takes every n-th sample of the stream, so an
epoch holds every sample once, over all of the service's workers and all processes that share its
`service_job`; crops and flips are those of the `tfdata` pipeline at the same position. Which batch
comes when, and to whom, is a matter of speed: the order is not repeatable, and a position is exact
only to the batches in flight. Going on at a position can therefore repeat or miss some of them.

`python -m benchmarks.data_service` starts such a service.
"""

import socket
from typing import Any
import uuid

import tensorflow as tf

from hpm.errors import UsageError
from hpm.pipelines import batches, iterable, raw, sources, tfdata

__all__ = ['INEXACT', 'ServicePipeline']

# For a command line to say before a training starts that is to be continued.
INEXACT = (
  'a tf.data service delivers in no fixed order: a run that goes on from a checkpoint may see '
  'samples twice, or miss some, as many as were in flight'
)
_TIMEOUT_S = 10.0


class ServicePipeline(tfdata.TfDataPipeline):
  """What `tfdata.TfDataPipeline` does, decoded by the workers of a tf.data service.

  The service must have been started with the addresses of its workers, since they share the data
  by their number in that list.

  Args:
    source: where undecoded samples come from; every worker of the service reads it by itself.
    service: 'host:port' of its dispatcher.
    service_job: processes that give the same name share the batches; None: this one has all. A name
      stands for one pass over one stream, so a new training needs a new one.
    compression: 'AUTO', which packs batches on the way, or None: uint8 images hardly shrink.
    **options: of `tfdata.TfDataPipeline`.

  Raises:
    UsageError: an option out of range, what the workers can't do, or no service that answers.
    DataError: as `tfdata.TfDataPipeline` does.
  """

  def __init__(
    self,
    source: sources.Source,
    *,
    service: str,
    service_job: str | None = None,
    compression: str | None = None,
    **options: Any,
  ):
    here = f'service={service!r}'
    if isinstance(source, iterable.IterableSource | raw.RawSource):
      raise UsageError(
        f'{here}: {source.origin} is read by this process, and the workers of a service are other '
        "ones: use pipeline='tfdata', or records"
      )
    for name, unset in (('bad_records', 'fail'), ('num_shards', 1)):
      if options.get(name, unset) != unset:
        raise UsageError(
          f'{here} and {name}={options[name]!r} do not go together: '
          + (
            'what is left out is listed by this process, and the workers are other ones'
            if name == 'bad_records'
            else 'processes share a service by its service_job'
          )
        )
    super().__init__(source, **options)
    if len(self._sizes) > 1:
      raise UsageError(f'{here}: with an image_size that changes, a batch could mix two sizes')
    host, colon, port = service.rpartition(':')
    if not colon or not port.isdecimal():
      raise UsageError(f'{here}: host:port of the dispatcher is needed, such as 10.0.0.7:5050')
    try:
      socket.create_connection((host.strip('[]'), int(port)), _TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
      raise UsageError(
        f'{here}: no tf.data service answers there ({error}): start one by '
        'python -m benchmarks.data_service'
      ) from None
    self._service, self._compression = service, compression
    self._job = service_job or uuid.uuid4().hex

  def _batches(self, first: int) -> tf.data.Dataset:
    hint = tf.data.experimental.SHARD_HINT  # each worker of the service puts its number here
    samples = self._samples(first).shard(hint, hint)
    service = tf.data.experimental.service
    endless = self._num_epochs is None
    return (
      self._decoded(samples)
      .batch(self.batch_size, drop_remainder=endless)
      .prefetch(self._prefetch)
      .apply(
        service.distribute(
          processing_mode=service.ShardingPolicy.HINT,
          service=f'grpc://{self._service}',
          job_name=f'{self._job}-{first}',
          compression=self._compression,
        )
      )
    )


batches.take_options(ServicePipeline)
