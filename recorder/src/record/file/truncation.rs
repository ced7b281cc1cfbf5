//! Lets the owner of a ring live on when the ring's file is truncated.
//!
//! Once a file is shorter than its mapping, an access to a missing page raises `SIGBUS`, which ends the process.
//! Whoever may write to the file can cause that: the user who owns it, or a script of theirs that empties `/dev/shm`.
//! No seal prevents it, since a file that has a name and outlives its process cannot be sealed. So a handler of that
//! signal replaces a missing page of a ring with private memory, and the access is repeated. Every other `SIGBUS` goes
//! to the handler that was there before, or ends the process as before.
//!
//! A handler that the program installs later, and that does not pass on what it does not know, ends this protection.

#![allow(unsafe_code)]

use nix::libc::{self, c_int, c_void, sigaction, siginfo_t};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// Maximum number of mappings of a process that are guarded.
const MAX_GUARDED: usize = 64;
/// The start of a range that is being set up. No mapping starts there.
const TAKEN: usize = 1;

/// The guarded ranges, which the handler searches. A handler can reach nothing but statics.
static GUARDED: [Range; MAX_GUARDED] = [const { Range::free() }; MAX_GUARDED];
/// The action for `SIGBUS` that this module's handler replaced; not set until the handler is installed.
static EARLIER: OnceLock<sigaction> = OnceLock::new();
/// The size of a page, which a handler must not look up.
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// The addresses of a guarded mapping.
struct Range {
    /// The first address; 0 if the range is free.
    start: AtomicUsize,
    /// The address after the last.
    end: AtomicUsize,
    /// How many pages were replaced.
    replaced: AtomicUsize,
}

impl Range {
    const fn free() -> Self {
        Self {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            replaced: AtomicUsize::new(0),
        }
    }
}

/// Guards one mapping until it is dropped, which must be before the mapping ends. Holds the index of the mapping's
/// range in [`GUARDED`]; `None` if all were taken.
#[derive(Debug)]
pub(super) struct TruncationGuard(Option<usize>);

impl TruncationGuard {
    /// Guards `bytes` bytes from the address `start`, which this process has mapped from a file for reading and
    /// writing. Nothing is guarded if [`MAX_GUARDED`] mappings are.
    pub(super) fn of(start: usize, bytes: usize) -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let free = |range: &Range| {
            let taken =
                range
                    .start
                    .compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed);
            taken.is_ok()
        };
        let index = GUARDED.iter().position(free);
        if let Some(range) = index.map(|index| &GUARDED[index]) {
            range.replaced.store(0, Ordering::Relaxed);
            range.end.store(start + bytes, Ordering::Relaxed);
            range.start.store(start, Ordering::Release);
        }
        Self(index)
    }

    /// Whether the file was found to be shorter than the mapping.
    pub(super) fn has_replaced(&self) -> bool {
        self.0
            .is_some_and(|index| GUARDED[index].replaced.load(Ordering::Relaxed) > 0)
    }
}

impl Drop for TruncationGuard {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            GUARDED[index].start.store(0, Ordering::Release);
        }
    }
}

/// Installs the handler of SIGBUS and keeps the earlier action for [`pass_on`].
fn install() {
    PAGE.store(rustix::param::page_size(), Ordering::Relaxed);
    let mut earlier = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: the call only writes the current action to `earlier`.
    let done = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), earlier.as_mut_ptr()) };
    if done != 0 {
        return;
    }
    // SAFETY: the call has succeeded, so it has written the whole value.
    let _ = EARLIER.set(unsafe { earlier.assume_init() });
    // SAFETY: every field of the struct is a number or an optional pointer, for which zero is a value.
    let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_bus_error;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the type that `SA_SIGINFO` asks for. It calls only what a signal handler may call:
    // atomics, and the system calls `mmap`, `sigaction` and `raise`; and the handler that was there before.
    let _ = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
}

/// The handler of SIGBUS: replaces a missing page of a guarded mapping, and passes on every other signal.
extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes a valid pointer to a handler that was installed with `SA_SIGINFO`.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // For other codes, such as a defect of the memory or a signal that a process sent, the address says nothing.
    if code == libc::BUS_ADRERR && replace_page(address) {
        return;
    }
    pass_on(code, signal, info, context);
}

/// Puts zeroed private memory in place of the page with this address, if it belongs to a guarded mapping.
fn replace_page(address: usize) -> bool {
    let is_in = |range: &&Range| {
        let start = range.start.load(Ordering::Acquire);
        start > TAKEN && start <= address && address < range.end.load(Ordering::Relaxed)
    };
    let Some(range) = GUARDED.iter().find(is_in) else {
        return false;
    };
    let page = PAGE.load(Ordering::Relaxed);
    let page_start = ptr::with_exposed_provenance_mut::<c_void>(address & !(page - 1));
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the page lies in a mapping of this crate, which stays mapped while it is guarded. The thread that faulted
    // is about to access it, so nothing relies on the file's page, which no longer exists. The memory is accessed as
    // atomic words only (`map.rs`), of which zero is a value.
    let mapped = unsafe { mmap_anonymous(page_start, page, prot, flags) };
    if mapped.is_ok() {
        range.replaced.fetch_add(1, Ordering::Relaxed);
    }
    mapped.is_ok()
}

/// Treats the signal as the process would without this module.
fn pass_on(code: c_int, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let earlier = EARLIER.get().map_or((libc::SIG_DFL, 0), |action| {
        (action.sa_sigaction, action.sa_flags)
    });
    match earlier {
        // A signal that a process sent is ignored; one that an access raised ends the process even so.
        (libc::SIG_IGN, _) if code <= 0 => {}
        (libc::SIG_IGN | libc::SIG_DFL, _) => {
            // SAFETY: as in `install`; zero is `SIG_DFL` and no flags. The signal is blocked while the handler runs,
            // and ends the process when it returns.
            unsafe {
                let default: sigaction = MaybeUninit::zeroed().assume_init();
                let _ = libc::sigaction(signal, &raw const default, ptr::null_mut());
                let _ = libc::raise(signal);
            }
        }
        (handler, flags) if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: a handler that was installed with `SA_SIGINFO` has this type.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        (handler, _) => {
            // SAFETY: a handler that was installed without `SA_SIGINFO` has this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
