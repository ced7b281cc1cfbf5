//! The native half of the Python package `rcomm`: a ring and the hooks of PyTorch that write it, and the
//! runtime's groups, as a backend of torch.distributed and over the arrays of other libraries.
//!
//! Python decides what is recorded and when (`rcomm/torch.py`); the hooks run at every operation of a job, and
//! none of them raises into the job or waits for another rank.
//!
//! | file | holds |
//! |---|---|
//! | `ring` | [`Ring`](ring::Ring): the recorder as a Python object, with its heartbeat |
//! | `hooks` | what PyTorch calls before and after each operation of a group |
//! | `native` | what the hooks in C++ call |
//! | `tensors` | shapes and types of PyTorch's tensors |
//! | `exit` | the process's exit code |
//! | `termination` | the end by SIGTERM |
//! | `frames` | which line of the program called |
//! | `process_group` | `torch.distributed`'s backend "rcomm" |
//! | `arrays` | the module `rcomm` for numpy and every library that has DLPack |
//! | `tables` | tables of a report in Arrow's layout |
//! | `pending` | watches operations until they are seen to end |

mod arrays;
mod exit;
mod frames;
mod hooks;
mod native;
mod pending;
mod process_group;
mod ring;
mod tables;
mod tensors;
mod termination;

use pyo3::prelude::*;

// The functions for C and C++ are in this library, too, so that both use one recorder.
use rcomm_recorder_capi as _;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::arrays::group::ArrayGroup;
    #[pymodule_export]
    use super::arrays::work::ArrayWork;
    #[pymodule_export]
    use super::arrays::world::ArrayWorld;
    #[pymodule_export]
    use super::hooks::GroupHooks;
    #[pymodule_export]
    use super::process_group::fork::note_fork;
    #[pymodule_export]
    use super::process_group::issue::Group;
    #[pymodule_export]
    use super::process_group::work::Work;
    #[pymodule_export]
    use super::process_group::world::{StoreServer, World};
    #[pymodule_export]
    use super::ring::Ring;
    #[pymodule_export]
    use super::tables::{Table, read_tables};
}
