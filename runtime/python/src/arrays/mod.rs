//! The module `rcomm` for numpy and every library that has DLPack: worlds, groups, operations in progress.
//!
//! Nothing of numpy or PyTorch is linked. Arrays are read through DLPack, or through Python's buffer protocol, and
//! operations work in their memory. `rcomm/_world.py` has what a process shares: the open world, phases, and the
//! interpreter's end.
//!
//! | file | holds |
//! |---|---|
//! | `world` | [`ArrayWorld`](world::ArrayWorld): how a process joins a job |
//! | `group` | [`ArrayGroup`](group::ArrayGroup): the operations |
//! | `parts` | the parts of all ranks in one array |
//! | `issue` | the path by which every operation is issued |
//! | `work` | [`ArrayWork`](work::ArrayWork): an operation in progress |
//! | `objects` | values other than arrays, as JSON |
//! | `memory` | arrays as buffers |
//! | `dlpack` | DLPack's structures |
//! | `errors` | the core's errors as Python's exceptions |

pub(crate) mod dlpack;
pub(crate) mod errors;
pub(crate) mod group;
mod issue;
pub(crate) mod memory;
mod objects;
mod parts;
pub(crate) mod work;
pub(crate) mod world;
