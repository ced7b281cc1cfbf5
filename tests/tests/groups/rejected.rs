//! An operation that the backend refuses to start fails, and counts as ended once.

use super::failing;
use rcomm::backend::Call;
use rcomm::{Config, Error, ErrorKind, FakeFabric, HashStore, Op, ReduceOp, Result, Store, World};
use rcomm_recorder::model::EntryState;
use rcomm_tests::hooked::{self, Hooks};
use rcomm_tests::world;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Refuses the first operation that is issued.
#[derive(Default)]
struct Choosy(AtomicBool);

impl Hooks for Choosy {
    fn issue(&self, _op: &Op<'_>, _call: &Call) -> Result<()> {
        match self.0.swap(true, Ordering::Relaxed) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unsupported, "not the first one")),
        }
    }
}

#[test]
fn a_rejected_operation_is_counted_as_ended_once() {
    const EXTRA: Duration = Duration::from_secs(7);
    let fabric = FakeFabric::new();
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let world = |rank| {
        let mut config = Config {
            backend: format!("cpu:{}", hooked::NAME),
            ..world::config(rank, 2)
        };
        failing(&mut config);
        let inner = fabric.factory(rank);
        let factory = move |_: &_| Ok(hooked::factory(inner, |_| Choosy::default()));
        let builder = World::builder(config).store(store.clone());
        builder.backend(factory).init().unwrap()
    };
    let (checked, was_checked) = mpsc::channel();
    let (mut checked, mut was_checked) = (Some(checked), Some(was_checked));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let world = &world;
            let checked = checked.take_if(|_| rank == 0);
            let was_checked = was_checked.take_if(|_| rank == 1);
            scope.spawn(move || {
                let world = world(rank);
                let group = world.group();
                let error = group.all_reduce_async(vec![1u8], ReduceOp::Sum);
                let error = error.map(|_| ()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                let snapshot = world.snapshot();
                let entry = snapshot.entries.last().unwrap();
                assert_eq!(entry.state, EntryState::Failed);
                assert!(entry.retired);
                // This time is added until the next collective has ended.
                group.extend_timeout(EXTRA);
                if let Some(was_checked) = was_checked {
                    was_checked.recv().expect("rank 0 has passed its checks");
                }
                let work = group.all_reduce_async(vec![1u8], ReduceOp::Sum).unwrap();
                if let Some(checked) = checked {
                    // Rank 1 has not come.
                    assert_eq!(group.timeout_extension(), EXTRA);
                    checked.send(()).unwrap();
                }
                assert_eq!(work.wait().unwrap(), [2]);
                assert_eq!(group.timeout_extension(), Duration::ZERO);
                let status = group.status();
                assert_eq!((status.last_started, status.last_completed), (2, 2));
                world.shutdown().unwrap();
            });
        }
    });
}
