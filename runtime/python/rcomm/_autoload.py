"""The functions that PyTorch calls through the package's entry points."""

import os


def distributed_backend() -> None:
    """Registers the backend "rcomm" (group ``torch.distributed.backends``): called when a program asks for it."""
    from ._backend import register

    register()


def torch_backend() -> None:
    """Switches recording on where ``RCOMM_RECORD`` asks for it; else does nothing.

    `import torch` calls it (group ``torch.backends``): it must be fast, and must not fail.
    """
    if os.environ.get("RCOMM_RECORD", "") in ("", "0"):
        return
    try:
        from .torch import record

        record()
    except Exception as error:  # No error of the recording may end the job.
        import logging

        logging.getLogger("rcomm").warning("rcomm does not record this process: %s", error)
