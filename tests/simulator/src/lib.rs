//! A stand-in for `libnccl.so.2` and `libcuda.so.1` over host memory: the symbols that the NCCL
//! backend calls, with the semantics that it relies on.
//!
//! It is loaded by an explicit path and is not part of the product. Streams are threads with a queue,
//! events are flags with a time, device memory is host memory, and a communicator is a connection to
//! a hub in the process that made the unique id. Faults are requested by an environment variable, see
//! `trouble`. Each behavior names the document or the line of NCCL's source that it follows; where
//! NCCL leaves behavior undefined (ranks that disagree on a collective), the simulator hangs, which is
//! what users see most often.
//!
//! The process ends after a call that would corrupt the state of the real libraries, for example if it uses a handle
//! after its end or memory that was freed, or calls the libraries from within a callback. One-sided operations inside a
//! group of calls are not simulated and end the process, too.
//!
//! It has the inconvenient behaviors of the library: calls on communicators that do not block launch on a
//! thread, aborts wait for the device's kernels, and failures leave state behind (`nccl::group`, `nccl::comm`,
//! `nccl::lifecycle`).
//!
//! What it cannot show: speed, overlap, and what depends on kernels sharing a device, except for how many a device
//! holds at once and in which order they start (`nccl::order`).

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::missing_safety_doc,
    reason = "what is exported is described in nccl.h and cuda.h"
)]

mod callback;
mod calls;
mod capture;
mod cuda;
mod handles;
mod hub;
mod nccl;
mod number;
mod stream;
mod trouble;
mod wire;
