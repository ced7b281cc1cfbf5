//! The plug-in's state in its process. The first communicator creates it, and a forked child does not use it. A clean
//! exit removes the ring; the rings of dead jobs are removed when the state is created.

use crate::process::Process;
use crate::settings::{self, CommunicatorIdentity, Events, IdentitySource};
use rcomm_recorder::publish::{KeptJobs, remove_jobs_beside_within};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Whether this process is a child that `fork` made.
static FORKED: AtomicBool = AtomicBool::new(false);
/// The process's ring and state; `None` if nothing is recorded.
static PROCESS: OnceLock<Option<Process>> = OnceLock::new();
/// The id of the process whose thread creates or has created the ring; 0 = no process has.
static OPENER: AtomicU32 = AtomicU32::new(0);
/// The longest time that a communicator waits while another thread creates or moves the ring.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest time for which rings of dead jobs are searched for and removed.
const OLD_RINGS: Duration = Duration::from_secs(10);

/// The plug-in's state, if it records.
#[inline]
pub(crate) fn process() -> Option<&'static Process> {
    let process = PROCESS.get()?.as_ref()?;
    (!FORKED.load(Ordering::Relaxed)).then_some(process)
}

/// The plug-in's state, which the first call creates. No lock is held during this time: a thread that calls at the same
/// time waits for at most [`PATIENCE`], and a child that `fork` makes at that time gets `None`.
pub(crate) fn process_or_open(
    first: Option<CommunicatorIdentity>,
    has_calls: bool,
) -> Option<&'static Process> {
    let this_process = std::process::id();
    match OPENER.compare_exchange(0, this_process, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let _ = PROCESS.set(guarded(None, || open(first, has_calls)));
            if let Some(process) = process() {
                guarded((), || remove_old_rings(process));
            }
        }
        Err(opener) if opener != this_process => return None,
        Err(_) => {
            let deadline = Instant::now() + PATIENCE;
            while PROCESS.get().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    process()
}

/// Removes the rings of dead jobs beyond the default limits, on a thread of its own. The rings belong to other jobs, so
/// the communicator does not wait for the disk, and the job does not fail because of them. The thread takes no signal
/// of the program's.
fn remove_old_rings(process: &'static Process) {
    let remove = || {
        block_signals();
        guarded((), || {
            let ring = process.recorder.storage();
            remove_jobs_beside_within(ring, &KeptJobs::default(), OLD_RINGS);
        });
    };
    // Without the thread, the next job that looks removes them.
    let _ = std::thread::Builder::new()
        .name("rcomm/old-rings".to_owned())
        .spawn(remove);
}

fn block_signals() {
    let mut all = std::mem::MaybeUninit::uninit();
    // SAFETY: `sigfillset` initializes the set, which lives until both calls return. They change the mask of this
    // thread alone.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// Prints one line to standard error. If it cannot be written, it is lost.
pub(crate) fn print_line(line: &str) {
    let line = format!("rcomm: NCCL profiler plug-in: {line}\n");
    // SAFETY: `line` holds `line.len()` bytes and lives until the call returns, which reads them alone.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

fn open(first: Option<CommunicatorIdentity>, has_calls: bool) -> Option<Process> {
    let lookup = |name: &str| std::env::var(name).ok();
    let events = match Events::parse(lookup("RCOMM_NCCL_EVENTS").as_deref()) {
        Ok(events) => events,
        Err(reason) => {
            print_line(&format!("records nothing: {reason}"));
            return None;
        }
    };
    if events.mask == 0 {
        return None;
    }
    let events = match has_calls {
        true => events,
        false => events.without_calls(),
    };
    let config = settings::ring_config(lookup, events, first);
    let opened = config.and_then(|(config, identity)| {
        let mut process = Process::open(&config, events)?;
        process.identity = identity;
        Ok(process)
    });
    let process = match opened {
        Ok(process) => process,
        Err(reason) => {
            print_line(&format!("records nothing: {reason}"));
            return None;
        }
    };
    if let rcomm_recorder::record::Storage::Memory { why: Some(why) } = process.recorder.storage() {
        print_line(&format!("records nothing: {why}"));
        return None;
    }
    // SAFETY: the addresses of both handlers stay valid: the library is linked with `nodelete`
    // (`build.rs`). They take the arguments that both functions call them with, and reach nothing but
    // statics, which last as long as the process.
    unsafe {
        libc::pthread_atfork(None, None, Some(forked));
        on_exit(exits, std::ptr::null_mut());
    }
    Some(process)
}

impl Process {
    /// Makes this process a rank of the job of a new communicator, if no launcher gives the process a job and the
    /// communicator is larger than all before. So the ranks of a program form one job even if its first communicators
    /// lack some ranks.
    ///
    /// Moves the ring's file. Another thread that calls this during the move waits for at most [`PATIENCE`].
    pub(crate) fn follow_largest(&self, communicator: &CommunicatorIdentity) {
        let is_larger = || communicator.size > self.recorder.identity().1;
        if self.identity == IdentitySource::Launcher || !is_larger() {
            return;
        }
        let deadline = Instant::now() + PATIENCE;
        while self.is_moving.swap(true, Ordering::Acquire) {
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if is_larger() {
            let job = communicator.job();
            let moved = (self.recorder).change_identity(&job, communicator.rank, communicator.size);
            if let Err(reason) = moved {
                print_line(&format!(
                    "the ring stays with the job of a smaller communicator: {reason}"
                ));
            }
        }
        self.is_moving.store(false, Ordering::Release);
    }
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

unsafe extern "C" {
    /// Like `atexit`; the function also gets the exit status.
    fn on_exit(call: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Removes the ring of a process that exits with status 0, without pending operations and without operations that an
/// abort has ended. After any other end the ring is left for analysis.
extern "C" fn exits(status: c_int, _: *mut c_void) {
    let _ = catch_unwind(|| {
        if let Some(process) = process()
            && status == 0
            && !process.has_pending()
        {
            let _ = process.recorder.close();
        }
    });
}

/// Runs code whose panic must not unwind into NCCL.
#[inline(always)]
pub(crate) fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}
