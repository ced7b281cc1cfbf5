//! `torch.distributed`'s backend "rcomm": a world's groups, over tensors.
//!
//! Nothing of PyTorch is linked: tensors are read by their attributes, and `rcomm/_backend.py` has the
//! classes that PyTorch's C++ requires.
//!
//! | file | holds |
//! |---|---|
//! | `world` | [`World`](world::World): how PyTorch's ranks join a job |
//! | `group` | the operations under PyTorch's names |
//! | `issue` | [`Group`](issue::Group), and the path by which every operation is issued |
//! | `monitored_barrier` | the monitored barrier |
//! | `work` | [`Work`](work::Work): an operation under way |
//! | `tensor` | tensors as buffers |
//! | `options` | PyTorch's option objects |
//! | `errors` | the core's errors as PyTorch's exceptions |
//! | `callbacks` | threads that complete futures and run callbacks |
//! | `held_world` | a world that threads share, and that one may abandon while others wait in it |
//! | `fork` | what a forked child must not use |
//! | `detached` | what is dropped without the interpreter's lock |

pub(crate) mod callbacks;
pub(crate) mod detached;
pub(crate) mod errors;
pub(crate) mod fork;
pub(crate) mod group;
pub(crate) mod held_world;
pub(crate) mod issue;
mod monitored_barrier;
pub(crate) mod options;
pub(crate) mod tensor;
pub(crate) mod work;
pub(crate) mod world;
