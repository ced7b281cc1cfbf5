//! The C binding: worlds, groups, every operation (element types are passed as codes), and operations in progress.
//!
//! `include/rcomm.h` is generated from this crate and documents how to use it from C. Codes of element types,
//! reductions and errors are those of the Rust crates and never change. Only the public interface of `rcomm`
//! is used.
//!
//! ```c
//! float gradients[1024] = {1.0f};
//! rcomm_reduction sum = {RCOMM_SUM, 1.0};
//! rcomm_world *world = NULL;
//! rcomm_group *group = NULL;
//! if (rcomm_init(&world) != RCOMM_OK || rcomm_world_group(world, &group) != RCOMM_OK ||
//!     rcomm_all_reduce(group, gradients, 1024, RCOMM_F32, sum, NULL) != RCOMM_OK) {
//!     fprintf(stderr, "%s\n", rcomm_last_error());
//!     exit(1);
//! }
//! rcomm_group_free(group);
//! rcomm_shutdown(world);
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `code` | codes of element types, reductions and errors |
//! | `status` | results of calls: the code and an error's text; no panic unwinds into C |
//! | `memory`, `operate` | C pointers as buffers; the common part of all operations |
//! | `world`, `group` | worlds and groups |
//! | `reducer` | gradients averaged in buckets |
//! | `config`, `store` | options of a world; stores of the caller |
//! | `control` | the program's handlers and waits, the debug level |
//! | `values` | collectives of small values over a store |
//! | `device` | streams, device memory, operations on it |
//! | `communicator` | the device memory of communicators; pools of memory that NCCL allocates |
//! | `collective`, `list`, `message` | operations on one or two buffers, on lists of them, between two ranks |
//! | `sparse`, `object`, `window`, `symmetric` | sparse tensors, JSON values, one-sided windows, symmetric memory |
//! | `work` | operations in progress |
#![allow(unsafe_code)]

pub mod code;
pub mod collective;
pub mod communicator;
pub mod config;
pub mod control;
pub mod device;
pub mod group;
pub mod list;
mod memory;
pub mod message;
pub mod object;
mod operate;
pub mod reducer;
pub mod sparse;
pub mod status;
pub mod store;
pub mod symmetric;
pub mod values;
pub mod window;
pub mod work;
pub mod world;
