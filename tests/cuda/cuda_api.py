"""`torch.cuda` under the stand-in: streams, events, generators and properties of the device."""

import contextlib
from typing import Any
from unittest import mock

import torch

from tests.cuda.backend import NAME
from tests.cuda.compiled import Graphs, compile
from tests.cuda.record import RECENT, Record
from tests.cuda.tensor import CUDA, CudaGenerator, CudaTensor

GIB = 2**30


class _Properties:
    name, major, minor, multi_processor_count, total_memory = "stand-in", 9, 0, 132, 80 * GIB


def _events(record: Record) -> type:
    class Event:
        """An event is reached once two more steps have begun: the device is behind the host."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.step: int | None = None

        def record(self, *_: Any) -> None:
            self.step = record.step

        def query(self) -> bool:
            return self.step is None or record.step - self.step >= RECENT

        def synchronize(self) -> None:
            if not self.query():
                record.wait("wait for an event")

        def wait(self, *_: Any) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return 0.0

    return Event


def _streams(record: Record, event: type) -> type:
    class Stream:
        device = CUDA
        device_index = 0

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, *_: Any) -> None: ...
        def wait_event(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            record.wait("stream.synchronize")

        def record_event(self, found: Any = None) -> Any:
            found = event() if found is None else found
            found.record(self)
            return found

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

    return Stream


@contextlib.contextmanager
def patched(record: Record, graphs: Graphs) -> Any:
    """Replace `torch.cuda`, `torch.Generator`, `torch.autocast` and `torch.compile`."""
    generator = CudaGenerator("cuda")
    generator.manual_seed(0)
    event = _events(record)
    stream_class = _streams(record, event)
    stream = stream_class()
    autocast = torch.autocast

    class Autocast(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(NAME if device_type == "cuda" else device_type, *args, **kwargs)

    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled(NAME if device_type == "cuda" else device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return dtype(NAME if device_type == "cuda" else device_type)

    def seed(number: int) -> None:
        generator.manual_seed(number)

    patches: dict[str, Any] = {
        "torch.Generator": CudaGenerator,
        "torch.autocast": Autocast,
        "torch.amp.autocast": Autocast,
        "torch.is_autocast_enabled": is_autocast_enabled,
        "torch.get_autocast_dtype": get_autocast_dtype,
        "torch.compile": compile,
        "torch.compiler.reset": graphs.reset,
        "torch.compiler.cudagraph_mark_step_begin": graphs.mark_step,
        "torch.cuda.default_generators": (generator,),
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.set_device": lambda *_: None,
        "torch.cuda.get_device_name": lambda *_: "stand-in",
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_properties": lambda *_: _Properties,
        "torch.cuda.mem_get_info": lambda *_: (60 * GIB, 80 * GIB),
        "torch.cuda.memory_allocated": lambda *_: 0,
        "torch.cuda.max_memory_allocated": lambda *_: 0,
        "torch.cuda.reset_peak_memory_stats": lambda *_: None,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.manual_seed": seed,
        "torch.cuda.manual_seed_all": seed,
        "torch.cuda.get_rng_state": lambda *_: generator.get_state(),
        "torch.cuda.set_rng_state": lambda state, *_: generator.set_state(state),
        "torch.cuda.get_rng_state_all": lambda: [generator.get_state()],
        "torch.cuda.set_rng_state_all": lambda states: generator.set_state(states[0]),
        "torch.cuda.Event": event,
        "torch.cuda.Stream": stream_class,
        "torch.cuda.stream": lambda chosen=None: chosen or stream,
        "torch.cuda.current_stream": lambda *_: stream,
        "torch.cuda.default_stream": lambda *_: stream,
        "torch.cuda.synchronize": lambda *_: record.wait("torch.cuda.synchronize"),
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.optim.optimizer._foreach_supported_types": [torch.Tensor, torch.nn.Parameter, CudaTensor],
        "torch.utils._foreach_utils._foreach_supported_types": [torch.Tensor, CudaTensor],
        "torch.utils._triton.has_triton": lambda *_: False,
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        yield
