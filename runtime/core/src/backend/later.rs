//! [`Later`]: work that the start of a world puts off.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

type Task = Box<dyn FnOnce() + Send>;

/// Work that the start of a world postpones, since the ranks of a host need its cores to start: a thread that only
/// serves others, or the removal of old files. The watchdog's thread does this work about a tenth of a second after it
/// has started, whether or not the world exists by then, and at the latest before it ends. The world does it earlier if
/// it opens a second backend. So the work must not wait for anything. [`Later::default`] puts nothing off: work is done
/// as soon as it is added.
///
/// # Thread safety
/// Every method may be called from any thread.
#[derive(Clone, Default)]
pub struct Later(Arc<Mutex<Option<Vec<Task>>>>);

impl Later {
    /// An empty list, of which nothing is done before [`run`](Self::run).
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Some(Vec::new()))))
    }

    /// Adds work. Does it now, on the caller's thread, if the rest has been done already.
    pub fn add(&self, work: impl FnOnce() + Send + 'static) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *list {
            Some(list) => list.push(Box::new(work)),
            None => {
                drop(list);
                work();
            }
        }
    }

    /// Does the work, in the order in which it was added; from now on, [`add`](Self::add) does it at once. The world
    /// calls this.
    pub fn run(&self) {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        list.into_iter().flatten().for_each(|work| work());
    }
}

impl fmt::Debug for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Later")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn work_is_done_once_in_order_and_at_once_when_the_rest_is_done() {
        let (sender, done) = channel();
        let later = Later::new();
        let add = |number: u32| {
            let sender = sender.clone();
            later.add(move || sender.send(number).unwrap());
        };
        add(1);
        add(2);
        assert!(done.try_recv().is_err());
        later.run();
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [1, 2]);
        add(3);
        later.run();
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [3]);
    }
}
