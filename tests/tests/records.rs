//! The record of each operation has the fields that stored files show; the ring has the size that the configuration
//! asks for; call sites are recorded, the log states the ring's size and steps, and rings of dead jobs are removed.
#![allow(clippy::unwrap_used)]

use rcomm::config::RingDir;
use rcomm::{
    Buffer, Complex, Config, F8E4M3, HashStore, MissingRanks, Op, OpType, ProcessGroup, ReduceOp,
    Reduction, Rendezvous, SparseTensor, World, bf16, f16,
};
use rcomm_recorder::publish::KeptJobs;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use rcomm_tests::process::wait_until;
use rcomm_tests::world::{Carrier, builder, config, on_threads};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tracing_subscriber::util::SubscriberInitExt;

/// Issues an operation, and the operations that it needs, on a group that has no others.
type Issue = fn(&ProcessGroup);

fn blank<T: Default + Clone>(len: usize) -> Vec<T> {
    vec![T::default(); len]
}

/// The operations, each issued by two ranks. In all uneven operations except `all_to_all_v_single`, rank 0 has one
/// element and rank 1 has two.
fn operations() -> Vec<(OpType, Issue)> {
    vec![
        (OpType::AllReduce, |g| {
            g.all_reduce(&mut [1f32; 3], Reduction::premul_sum(0.5))
                .unwrap();
        }),
        (OpType::AllReduceCoalesced, |g| {
            let (mut a, mut b) = ([1u8; 2], [2u8; 5]);
            g.all_reduce_coalesced(&mut [&mut a, &mut b], ReduceOp::BitOr)
                .unwrap();
        }),
        (OpType::AllReduceSparse, |g| {
            let tensor = SparseTensor::new(vec![4, 2], 1, vec![g.rank().into()], vec![1f64, 2.0]);
            g.all_reduce_sparse(&tensor.unwrap(), ReduceOp::Sum)
                .unwrap();
        }),
        (OpType::Reduce, |g| {
            g.reduce(&mut [f16::ONE; 2], ReduceOp::Avg, 1).unwrap()
        }),
        (OpType::Broadcast, |g| {
            let buffer = Buffer::from_vec(vec![0i16; 6]).with_shape(&[2, 3]).unwrap();
            g.execute(Op::Broadcast { buffer, root: 1 }).unwrap();
        }),
        (OpType::Barrier, |g| g.barrier().unwrap()),
        (OpType::MonitoredBarrier, |g| {
            g.monitored_barrier(MissingRanks::All).unwrap()
        }),
        (OpType::AllGather, |g| {
            let (mut a, mut b) = ([0i32; 2], [0i32; 2]);
            g.all_gather(&[7; 2], &mut [&mut a, &mut b]).unwrap();
        }),
        (OpType::AllGatherSingle, |g| {
            g.all_gather_single(&[true], &mut [false; 2]).unwrap();
        }),
        (OpType::AllGatherV, |g| {
            let (mut a, mut b) = ([0u16; 1], [0u16; 2]);
            let input = blank(g.rank() as usize + 1);
            g.all_gather_v(&input, &mut [&mut a, &mut b]).unwrap();
        }),
        (OpType::AllGatherCoalesced, |g| {
            let (mut a, mut b) = ([0i64; 2], [0i64; 4]);
            g.all_gather_coalesced(&[&[1], &[2, 3]], &mut [&mut a, &mut b])
                .unwrap();
        }),
        (OpType::ReduceScatter, |g| {
            g.reduce_scatter(&[&[1u32; 2], &[2; 2]], &mut [0; 2], ReduceOp::Max)
                .unwrap();
        }),
        (OpType::ReduceScatterSingle, |g| {
            g.reduce_scatter_single(&[bf16::ONE; 4], &mut [bf16::ONE; 2], ReduceOp::Sum)
                .unwrap();
        }),
        (OpType::ReduceScatterV, |g| {
            let mut output = blank::<u64>(g.rank() as usize + 1);
            g.reduce_scatter_v(&[&[1], &[2; 2]], &mut output, ReduceOp::Min)
                .unwrap();
        }),
        (OpType::ReduceScatterCoalesced, |g| {
            let (mut a, mut b) = ([0i8; 1], [0i8; 2]);
            let inputs: [&[i8]; 2] = [&[1; 2], &[1; 4]];
            g.reduce_scatter_coalesced(&inputs, &mut [&mut a, &mut b], ReduceOp::Product)
                .unwrap();
        }),
        (OpType::AllToAll, |g| {
            let (mut a, mut b) = ([Complex::new(0f32, 0.0); 1], [Complex::new(0f32, 0.0); 1]);
            let one = [Complex::new(1f32, 2.0)];
            g.all_to_all(&[&one, &one], &mut [&mut a, &mut b]).unwrap();
        }),
        (OpType::AllToAllSingle, |g| {
            let one = F8E4M3::from_f32(1.0);
            g.all_to_all_single(&[one; 2], &mut [one; 2]).unwrap();
        }),
        (OpType::AllToAllVSingle, |g| {
            // Rank 0 keeps 1 and sends 2; rank 1 sends 3 and keeps 4.
            let (sent, received): ([usize; 2], [usize; 2]) = if g.rank() == 0 {
                ([1, 2], [1, 3])
            } else {
                ([3, 4], [2, 4])
            };
            let input = blank::<f32>(sent.iter().sum());
            let mut output = blank::<f32>(received.iter().sum());
            g.all_to_all_v_single(&input, &mut output, &sent, &received)
                .unwrap();
        }),
        (OpType::Gather, |g| {
            let (mut a, mut b) = ([0f64; 2], [0f64; 2]);
            let mut both: Vec<&mut [f64]> = vec![&mut a, &mut b];
            both.truncate(if g.rank() == 1 { 2 } else { 0 });
            g.gather(&[1.0; 2], &mut both, 1).unwrap();
        }),
        (OpType::GatherV, |g| {
            let (mut a, mut b) = ([0u8; 1], [0u8; 2]);
            let mut both: Vec<&mut [u8]> = vec![&mut a, &mut b];
            both.truncate(if g.rank() == 1 { 2 } else { 0 });
            g.gather_v(&blank(g.rank() as usize + 1), &mut both, 1)
                .unwrap();
        }),
        (OpType::Scatter, |g| {
            let mut both: Vec<&[u8]> = vec![&[1], &[2]];
            both.truncate(if g.rank() == 1 { 2 } else { 0 });
            g.scatter(&both, &mut [0], 1).unwrap();
        }),
        (OpType::ScatterV, |g| {
            let mut both: Vec<&[u8]> = vec![&[1], &[2, 3]];
            both.truncate(if g.rank() == 1 { 2 } else { 0 });
            g.scatter_v(&both, &mut blank(g.rank() as usize + 1), 1)
                .unwrap();
        }),
        (OpType::Send, |g| {
            if g.rank() == 1 {
                g.send(&[1u8, 2], 0, 3).unwrap();
            } else {
                g.recv(&mut [0u8; 2], 1, 3).unwrap();
            }
        }),
        (OpType::Recv, |g| {
            if g.rank() == 0 {
                g.send(&[1i64], 1, 3).unwrap();
                g.send(&[1i64], 1, 4).unwrap();
            } else {
                g.recv(&mut [0i64], 0, 3).unwrap();
                g.recv_any(&mut [0i64], 4).unwrap();
            }
        }),
        (OpType::Coalesced, |g| {
            let other = Some(1 - g.rank());
            let send = Op::Send {
                buffer: Buffer::from_vec(vec![1u8; 3]),
                peer: 1 - g.rank(),
                tag: 0,
            };
            let recv = Op::Recv {
                buffer: Buffer::from_vec(vec![0u8; 3]),
                peer: other,
                tag: 0,
            };
            g.batch_isend_irecv(vec![send, recv])
                .unwrap()
                .wait()
                .unwrap();
        }),
        (OpType::NewWindow, |g| {
            let window = g.new_window(Buffer::from_vec(vec![0f32; 4])).unwrap();
            window.close().unwrap();
        }),
        (OpType::Put, |g| {
            let window = g.new_window(g.allocate::<f32>(4).unwrap()).unwrap();
            window.put(1 - g.rank(), 1, &[1f32, 2.0]).unwrap();
            window.close().unwrap();
        }),
        (OpType::Get, |g| {
            let window = g.new_window(g.allocate::<f32>(4).unwrap()).unwrap();
            window.get(1 - g.rank(), 1, &mut [0f32; 3]).unwrap();
            window.close().unwrap();
        }),
        (OpType::Signal, |g| {
            let window = g.new_window(g.allocate::<f32>(0).unwrap()).unwrap();
            window.signal(1 - g.rank()).unwrap();
            window.close().unwrap();
        }),
        (OpType::WaitSignal, |g| {
            let window = g.new_window(g.allocate::<f32>(0).unwrap()).unwrap();
            window.signal(1 - g.rank()).unwrap();
            window.wait_signal(1 - g.rank()).unwrap();
            window.close().unwrap();
        }),
    ]
}

/// Fields that differ from run to run, or that other tests check.
const REDACTED: &[&str] = &[
    "record_id",
    "pg_id",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "duration_ms",
    "frames",
    "stack",
    "thread_id",
    "thread_name",
    // The watchdog sets this field later for asynchronous operations.
    "retired",
];

/// The entries of one group, with what differs from run to run left out.
fn entries_of(dump: &[u8], group: &str) -> Vec<Value> {
    let dump: Value = serde_json::from_slice(dump).unwrap();
    let mut found = Vec::new();
    for entry in dump["entries"].as_array().unwrap() {
        if entry["process_group"][1] != group {
            continue;
        }
        let mut entry = entry.clone();
        let fields = entry.as_object_mut().unwrap();
        for field in REDACTED {
            fields.remove(*field);
        }
        found.push(entry);
    }
    found
}

#[test]
fn every_operation_is_recorded_with_all_its_fields() {
    let dumps = on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            for (op, issue) in operations() {
                let group = world.new_group(&[0, 1], &rcomm::GroupOptions::named(op.name()));
                issue(&group.unwrap());
            }
            let dump = world.snapshot().to_json();
            world.shutdown().unwrap();
            dump
        },
    );
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/records");
    let update = std::env::var_os("RCOMM_UPDATE_RECORDS").is_some();
    let mut wrong = Vec::new();
    for (op, _) in operations() {
        // Rank 1 is the root, and has the longer part.
        let entries = entries_of(&dumps[1], op.name());
        assert!(!entries.is_empty(), "{op} left no record");
        let text = serde_json::to_string_pretty(&entries).unwrap() + "\n";
        let path = folder.join(format!("{op}.json"));
        if update {
            std::fs::write(&path, &text).unwrap();
        }
        let stored = std::fs::read_to_string(&path).unwrap_or_default();
        if stored != text {
            wrong.push(format!("{}:\n{text}", path.display()));
        }
    }
    assert!(
        wrong.is_empty(),
        "records differ from the stored ones (RCOMM_UPDATE_RECORDS=1 writes them):\n{}",
        wrong.join("\n")
    );
}

#[test]
fn every_operation_that_has_its_own_record_is_compared() {
    let listed: BTreeSet<OpType> = operations().into_iter().map(|(op, _)| op).collect();
    let missing = OpType::ALL.iter().filter(|op| !listed.contains(op));
    let missing: Vec<&OpType> = missing.collect();
    // A split is recorded as an all-gather, and no operation of rcomm is recorded as `Other`.
    assert_eq!(missing, [&OpType::Split, &OpType::Other]);
}

#[test]
fn the_ring_gets_its_memory_before_operations_need_it() {
    on_threads(
        1,
        &Carrier::Cpu,
        |_| {},
        |world| {
            wait_until("the watchdog to touch the whole ring", || {
                (!world.recorder().touch_ahead(0)).then_some(())
            });
            world.shutdown().unwrap();
        },
    );
}

#[test]
fn a_call_site_of_another_language_is_recorded() {
    let dumps = on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let recorder = world.recorder();
            let site = recorder.intern_call_site("train.py", "main", 64);
            let group = world.group().called_at(site);
            group.barrier().unwrap();
            let dump = world.snapshot().to_json();
            world
                .shutdown_within(std::time::Duration::from_secs(60))
                .unwrap();
            dump
        },
    );
    for dump in dumps {
        let dump: Value = serde_json::from_slice(&dump).unwrap();
        let entry = &dump["entries"][0];
        let stack = entry["stack"].as_u64().unwrap() as usize;
        let frame = dump["stacks"][stack][0].as_u64().unwrap() as usize;
        let frame = &dump["frames"][frame];
        assert_eq!(
            (&frame["filename"], &frame["line"]),
            (&Value::from("train.py"), &Value::from(64))
        );
    }
}

#[test]
fn several_threads_join_one_operation() {
    on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let work = world
                .group()
                .all_reduce_async(vec![1f32; 4], ReduceOp::Sum)
                .unwrap();
            std::thread::scope(|scope| {
                let joins = [0, 1].map(|_| scope.spawn(|| work.join().map(|_| ())));
                for join in joins {
                    join.join().unwrap().unwrap();
                }
            });
            assert_eq!(work.wait().unwrap(), [2f32; 4]);
            world
                .shutdown_within(std::time::Duration::from_secs(60))
                .unwrap();
        },
    );
}

/// A log that a test reads.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_log_has_the_rings_size_at_the_start_and_its_steps_when_they_are_known() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = subscriber.set_default();
    let entries_and_steps_line = |mib| {
        let options = Config {
            ring_mib: Some(mib),
            ..config(0, 1)
        };
        let world = builder(options, Arc::new(HashStore::new()), &Carrier::Cpu).init();
        let world = world.unwrap();
        for step in 0..10 {
            world.step(step);
            for _ in 0..100 {
                world.group().barrier().unwrap();
            }
        }
        let size = (
            world.recorder().entries(),
            world.recorder().size_bytes() as f64 / f64::from(1 << 20),
        );
        world.shutdown().unwrap();
        let text = String::from_utf8(std::mem::take(&mut log.0.lock().unwrap())).unwrap();
        let line = |part: &str| {
            let mut lines = text.lines().filter(|line| line.contains(part));
            let line = lines.next().unwrap_or_else(|| panic!("{part}: {text}"));
            assert_eq!(lines.next(), None, "{text}");
            line.to_owned()
        };
        let made = line("world made");
        let expected = format!("ring_mib={:.1} ring_entries={}", size.1, size.0);
        assert!(made.contains(&expected), "{expected}: {made}");
        assert!(size.1 <= f64::from(mib), "{made}");
        (size.0, line("ring_steps"))
    };
    let (entries, line) = entries_and_steps_line(4);
    assert_eq!(entries, 16_384);
    assert!(
        line.contains("ring_steps=163 operations_per_step=100"),
        "{line}"
    );
    let (entries, line) = entries_and_steps_line(1);
    assert!(entries < 16_384, "{entries}");
    let steps = format!("ring_steps={} operations_per_step=100", entries / 100);
    assert!(line.contains(&steps), "{line}");
}

#[test]
fn a_ring_with_few_steps_gives_a_warning_that_says_how_large_it_should_be() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = subscriber.set_default();
    let options = Config {
        ring_entries: 64,
        ..config(0, 1)
    };
    let world = builder(options, Arc::new(HashStore::new()), &Carrier::Cpu).init();
    let world = world.unwrap();
    for step in 100..110 {
        world.step(step);
        (0..30).for_each(|_| world.group().barrier().unwrap());
    }
    world.shutdown().unwrap();
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let warning = text.lines().find(|line| line.contains("RCOMM_RING_STEPS"));
    let warning = warning.unwrap_or_else(|| panic!("no warning names RCOMM_RING_STEPS: {text}"));
    assert!(warning.contains("WARN"), "{warning}");
    assert!(warning.contains("RCOMM_RING_STEPS=8x30"), "{warning}");
    assert!(warning.contains("ring_steps=2"), "{warning}");
}

#[test]
fn a_size_without_room_for_the_tables_is_refused() {
    // The tables have the members of the group of all ranks, here 200,000.
    let options = Config {
        ring_mib: Some(1),
        ..config(0, 200_000)
    };
    let error = builder(options, Arc::new(HashStore::new()), &Carrier::Cpu).init();
    let error = error.expect_err("there is no room").to_string();
    assert!(error.contains("a ring of 1 MiB has no room"), "{error}");
    let least = RecorderConfig::new("job", 0, 200_000).bytes_with(1);
    let least = format!("it takes {} MiB or more", least.div_ceil(1 << 20));
    assert!(error.contains(&least), "{least}: {error}");
}

#[test]
fn a_world_removes_the_rings_of_dead_jobs_soon_after_its_start_or_as_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let dead = directory.path().join("dead");
    for awaits_removal in [true, false] {
        let mut ring = RecorderConfig::new("dead", 0, 1);
        ring.placement = Placement::Dir(directory.path().to_owned());
        // Dropping a recorder leaves the ring, as the end of its process does.
        drop(FlightRecorder::create(&ring).unwrap());
        assert!(dead.exists());
        let config = Config {
            rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1).unwrap()),
            ring_dir: RingDir::Dir(directory.path().to_owned()),
            kept_jobs: KeptJobs {
                jobs: 0,
                ..KeptJobs::default()
            },
            ..Config::default()
        };
        let store = Arc::new(HashStore::new());
        let world = World::builder(config).store(store).init().unwrap();
        let is_removed = || (!dead.exists()).then_some(());
        if awaits_removal {
            wait_until("the removal of the dead job's ring", is_removed);
        }
        world.shutdown().unwrap();
        wait_until("the removal of the dead job's ring", is_removed);
    }
}
