//! A call that may never return, on a separate thread.

use rcomm_core::{Error, ErrorKind, Result};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// A call on a separate thread. [`wait`](Self::wait) joins the thread when the call has returned. A caller that gives
/// up earlier drops this value, which detaches the thread.
pub(crate) struct ForeignCall<T> {
    name: &'static str,
    returned: Receiver<T>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> ForeignCall<T> {
    /// Makes the call on a thread of this name.
    ///
    /// # Errors
    /// `Io` if no thread can be started.
    pub(crate) fn begin(
        name: &'static str,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Self> {
        let (sender, returned) = channel();
        let work = move || {
            // If the caller has given up, the send fails, and the result of the call is dropped on this thread.
            drop(sender.send(call()));
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread
            .spawn(work)
            .map_err(|error| Error::io(format!("cannot start the thread {name}"), error))?;
        Ok(Self {
            name,
            returned,
            thread: Some(thread),
        })
    }

    /// Returns the result of the call, which may be taken once; `None` if the call does not return within `time`.
    ///
    /// # Errors
    /// `Backend` if the call panicked.
    pub(crate) fn wait(&mut self, time: Duration) -> Result<Option<T>> {
        let returned = match self.returned.recv_timeout(time) {
            Ok(returned) => Ok(Some(returned)),
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                let message = format!("the thread {} panicked", self.name);
                Err(Error::new(ErrorKind::Backend, message))
            }
        };
        // Invariant 10 of docs/ARCHITECTURE.md: the call is over, so the thread ends by itself. A panic was reported as
        // the error above.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        returned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    const LONG: Duration = Duration::from_secs(60);

    /// Sets its flag when its thread ends, 50 ms after the thread's work is done.
    struct EndFlag(Arc<AtomicBool>);

    impl Drop for EndFlag {
        fn drop(&mut self) {
            std::thread::sleep(Duration::from_millis(50));
            self.0.store(true, Ordering::Release);
        }
    }

    thread_local! {
        static LAST: RefCell<Option<EndFlag>> = const { RefCell::new(None) };
    }

    #[test]
    fn the_thread_of_a_call_that_returned_is_joined() {
        for panics in [false, true] {
            let has_ended = Arc::new(AtomicBool::new(false));
            let flag = has_ended.clone();
            let call = ForeignCall::begin("rcomm/test", move || {
                LAST.set(Some(EndFlag(flag)));
                assert!(!panics, "on purpose");
                7
            });
            let returned = call.unwrap().wait(LONG);
            assert!(has_ended.load(Ordering::Acquire));
            match panics {
                false => assert_eq!(returned.unwrap(), Some(7)),
                true => assert_eq!(returned.unwrap_err().kind(), ErrorKind::Backend),
            }
        }
    }

    #[test]
    fn a_caller_that_gives_up_does_not_wait_for_the_call() {
        let (go_on, gate) = channel::<()>();
        let (ended, end) = channel();
        let mut call = ForeignCall::begin("rcomm/test", move || {
            let _ = gate.recv();
            ended.send(()).unwrap();
        })
        .unwrap();
        assert_eq!(call.wait(Duration::from_millis(1)).unwrap(), None);
        drop(call);
        // The thread is still in the call, and continues when the call returns.
        assert!(end.try_recv().is_err());
        go_on.send(()).unwrap();
        end.recv_timeout(LONG).unwrap();
    }
}
