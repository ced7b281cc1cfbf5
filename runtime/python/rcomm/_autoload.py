"""The functions that PyTorch calls through the package's entry points."""

import os


def distributed_backend() -> None:
    """Registers the backend "rcomm". PyTorch calls this (group ``torch.distributed.backends``) when a program asks for
    that backend."""
    from ._backend import register

    register()


def torch_backend() -> None:
    """Switches recording on if ``RCOMM_RECORD`` is set, to anything but 0.

    `import torch` calls this function (group ``torch.backends``), so it must be fast, and must not raise.
    """
    if os.environ.get("RCOMM_RECORD", "") in ("", "0"):
        return
    try:
        from .torch import record

        record()
    except Exception as error:  # No error of the recording may end the job.
        import logging

        logging.getLogger("rcomm").warning("rcomm does not record this process: %s", error)
