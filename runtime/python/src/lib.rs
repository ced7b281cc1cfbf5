//! The native half of the Python package `rcomm`: a ring, and the hooks of PyTorch that write it.
//!
//! Python decides what is recorded and when (`rcomm/torch.py`); here is what runs at every operation of a
//! job. None of it raises into the job, and none of it waits.
//!
//! | file | holds |
//! |---|---|
//! | `ring` | [`Ring`](ring::Ring): the recorder as a Python object, with its heartbeat |
//! | `hooks` | what PyTorch calls before and after each operation of a group |
//! | `tensors` | shapes and types of PyTorch's tensors |
//! | `frames` | which line of the program called |
//! | `pending` | operations under way, until they are seen to end |

mod frames;
mod hooks;
mod pending;
mod ring;
mod tensors;

use pyo3::prelude::*;

// What C and C++ call is in this library, too: one recorder for both.
use rcomm_recorder_capi as _;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::hooks::GroupHooks;
    #[pymodule_export]
    use super::ring::Ring;
}
