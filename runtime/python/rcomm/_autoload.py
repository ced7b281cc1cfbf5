"""What `import torch` calls (entry point group ``torch.backends``): it must be fast, and must not fail."""

import os


def torch_backend() -> None:
    """Switches recording on where ``RCOMM_RECORD`` asks for it; else does nothing."""
    if os.environ.get("RCOMM_RECORD", "") in ("", "0"):
        return
    try:
        from .torch import record

        record()
    except Exception as error:  # Whatever it is, the job comes first.
        import logging

        logging.getLogger("rcomm").warning("rcomm does not record this process: %s", error)
