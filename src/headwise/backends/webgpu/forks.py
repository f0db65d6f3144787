"""WebGPU in a forked process, where the driver's threads do not exist and any call into it would hang."""

from __future__ import annotations


class ForkedProcess(RuntimeError):
    """WebGPU was opened before this process was forked. The message says what to do."""


class Refusal:
    """Takes the place of a lock that every use of WebGPU acquires first."""

    def __enter__(self) -> None:
        raise ForkedProcess(
            "WebGPU was opened before this process was forked, and no GPU driver survives a fork: the call would hang. "
            "Start the process with the method 'spawn' (DataLoader(multiprocessing_context='spawn'), "
            "multiprocessing.get_context('spawn')), or give it CPU tensors only (x.torch(), backend='cpu')"
        )

    def __exit__(self, *error: object) -> None:
        pass
