//! Jobs with a wrong configuration get one clear error before their time-out. The tests also show what ranks agree on
//! when they start, and what they leave when they end.
#![allow(clippy::unwrap_used)]

mod silent;

use rcomm::config::{RingDir, StoreChoice, TransportChoice};
use rcomm::{
    Config, Error, ErrorKind, GroupOptions, HashStore, ReduceOp, Rendezvous, Store, TcpStore, World,
};
use rcomm_recorder::publish::{Dump, KeptJobs};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use rcomm_tests::process::wait_until;
use rcomm_tests::world::{Carrier, builder, config, on_threads};
use std::sync::Arc;
use std::time::Duration;

fn rendezvous(rank: u32, world_size: u32, port: u16) -> Rendezvous {
    Rendezvous::explicit(rank, world_size, "127.0.0.1", port).unwrap()
}

fn config_at(rendezvous: Rendezvous) -> Config {
    Config {
        rendezvous: Some(rendezvous),
        init_timeout: Duration::from_secs(20),
        ring_dir: RingDir::Memory,
        // The error does not depend on which clients may use the store.
        store: StoreChoice::Open,
        ..Config::default()
    }
}

/// The error of a world that cannot be made.
fn refusal(config: Config) -> Error {
    World::init(config).expect_err("a wrong set-up")
}

/// Starts rank 0 of a world of two, whose rank 1 has not joined yet. Returns its thread and the port.
fn half_a_job() -> (std::thread::JoinHandle<rcomm::Result<World>>, u16) {
    half_a_job_with(|_| {})
}

/// Works as [`half_a_job`], with other options for rank 0.
fn half_a_job_with(
    change: impl FnOnce(&mut Config),
) -> (std::thread::JoinHandle<rcomm::Result<World>>, u16) {
    // The kernel chooses the port, so that no other test gets it.
    let store = TcpStore::host("127.0.0.1", 0, Duration::from_secs(20)).unwrap();
    let port = store.port();
    let store: Arc<dyn Store> = Arc::new(store);
    let mut config = config_at(rendezvous(0, 2, port));
    change(&mut config);
    let builder = World::builder(config).store(store.clone());
    let first = std::thread::spawn(move || builder.init());
    // Rank 0 has put the job and its size into the store now, so that any other rank is the second.
    let checked_in = ["rcomm/rendezvous/0/job"];
    store.wait(&checked_in, Duration::from_secs(20)).unwrap();
    (first, port)
}

/// Joins rank 1, and shuts both worlds down.
fn complete(first: std::thread::JoinHandle<rcomm::Result<World>>, port: u16) {
    let second = World::init(config_at(rendezvous(1, 2, port))).unwrap();
    let first = first.join().unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| second.shutdown().unwrap());
        scope.spawn(|| first.shutdown().unwrap());
    });
}

#[test]
fn a_rank_that_was_started_twice_is_refused() {
    let (first, port) = half_a_job();
    let second = World::init(config_at(rendezvous(1, 2, port))).unwrap();
    let error = refusal(config_at(rendezvous(1, 2, port)));
    assert_eq!(error.kind(), ErrorKind::Rendezvous);
    assert!(error.to_string().contains("rank 1"), "{error}");
    assert!(error.to_string().contains("started 2 times"), "{error}");
    drop((second, first.join().unwrap().unwrap()));
}

#[test]
fn two_jobs_at_one_port_are_distinguished() {
    let (first, port) = half_a_job();
    let mut other = rendezvous(1, 2, port);
    other.job = "another".to_owned();
    let error = refusal(config_at(other));
    assert_eq!(error.kind(), ErrorKind::Rendezvous);
    assert!(error.to_string().contains("two jobs share"), "{error}");
    complete(first, port);
}

#[test]
fn world_sizes_that_disagree_are_both_named() {
    let (first, port) = half_a_job();
    let error = refusal(config_at(rendezvous(2, 3, port)));
    assert_eq!(error.kind(), ErrorKind::Rendezvous);
    let text = error.to_string();
    assert!(
        text.contains("size of 3") && text.contains("one of 2"),
        "{text}"
    );
    complete(first, port);
}

#[test]
fn a_rank_with_another_world_size_ends_the_wait_for_it() {
    let (first, port) = half_a_job_with(|config| config.init_timeout = Duration::from_secs(3_600));
    let sentence = "rank 1 was given a world size of 4, another rank of job";
    let error = refusal(config_at(rendezvous(1, 4, port))).to_string();
    assert!(error.starts_with(sentence), "{error}");
    // Rank 0 gets the error long before its own deadline.
    let error = first.join().unwrap().expect_err("rank 1 was refused");
    assert!(error.to_string().starts_with(sentence), "{error}");
}

#[test]
fn all_ranks_present_report_the_same_missing_rank() {
    // The time-out of rank 1 is longer than that of rank 0, whose process serves the store.
    let (first, port) = half_a_job_with(|config| {
        config.init_timeout = Duration::from_secs(10);
        config.status_wait = Duration::from_secs(60);
        if let Some(rendezvous) = &mut config.rendezvous {
            rendezvous.world_size = 3;
        }
    });
    let errors = [
        refusal(config_at(rendezvous(1, 3, port))),
        first.join().unwrap().expect_err("rank 2 is missing"),
    ];
    for error in errors {
        let expected = "not all 3 ranks arrived in time: missing rank 2";
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_port_without_a_listener_is_named() {
    // Port 1 has been out of use for decades.
    let error = refusal(Config {
        init_timeout: Duration::from_millis(300),
        ..config_at(rendezvous(1, 2, 1))
    });
    assert_eq!(error.kind(), ErrorKind::Rendezvous);
    assert!(error.to_string().contains("127.0.0.1 port 1 "), "{error}");
}

#[test]
fn ranks_that_do_not_arrive_are_named() {
    let config = Config {
        init_timeout: Duration::from_millis(300),
        ..config(0, 4)
    };
    let world = builder(config, Arc::new(HashStore::new()), &Carrier::Cpu);
    let error = world.init().expect_err("three ranks are missing");
    assert_eq!(error.kind(), ErrorKind::Rendezvous);
    assert!(
        error.to_string().contains("missing ranks 1, 2, 3"),
        "{error}"
    );
}

/// The errors of three ranks that were given these secrets, by rank.
fn refusals_of_secrets(secrets: [Option<&str>; 3]) -> Vec<String> {
    // Rank 0 gets the TCP store, which ends with it.
    let store = TcpStore::host("127.0.0.1", 0, Duration::from_secs(20)).unwrap();
    let port = store.port();
    let mut store = Some(store);
    std::thread::scope(|scope| {
        let ranks = (0..3).zip(secrets).map(|(rank, secret)| {
            let config = Config {
                secret: secret.map(rcomm::Secret::from_text),
                // Rank 0 stays until all have been refused.
                status_wait: Duration::from_secs(60),
                ..config_at(rendezvous(rank, 3, port))
            };
            let mut builder = World::builder(config);
            if let Some(store) = store.take() {
                builder = builder.store(Arc::new(store));
            }
            scope.spawn(move || builder.init().expect_err("secrets that differ"))
        });
        let ranks: Vec<_> = ranks.collect();
        let errors = ranks.into_iter().map(|rank| rank.join().unwrap());
        errors
            .map(|error| {
                assert_eq!(error.kind(), ErrorKind::Rendezvous, "{error}");
                error.to_string()
            })
            .collect()
    })
}

#[test]
fn all_ranks_report_differing_secrets_before_they_connect() {
    let advice = "set RCOMM_JOB_SECRET to the same value on all ranks, or on none";
    let (ours, theirs) = (Some("one"), Some("two"));
    for (secrets, difference) in [
        ([ours, theirs, ours], "a job secret, but rank 1 another"),
        ([ours, None, None], "a job secret, but ranks 1, 2 none"),
        ([None, None, ours], "no job secret, but rank 2 one"),
    ] {
        let sentence = format!("rank 0 was given {difference}: {advice}");
        assert_eq!(
            refusals_of_secrets(secrets),
            [(); 3].map(|()| sentence.clone())
        );
    }
}

#[test]
fn ranks_of_several_hosts_agree_on_a_secret_that_the_store_does_not_contain() {
    let server = TcpStore::host("127.0.0.1", 0, Duration::from_secs(20)).unwrap();
    let port = server.port();
    let store: Arc<dyn Store> = Arc::new(server);
    // The system resolves this name to the loopback address; the ranks cannot tell that all of them are on
    // one host.
    let rendezvous = |rank| Rendezvous::explicit(rank, 3, "127.1", port).unwrap();
    assert!(!rendezvous(0).is_on_one_host());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let builder = World::builder(config_at(rendezvous(rank))).store(store.clone());
            scope.spawn(move || {
                // Both ends of a data connection prove the secret.
                let world = builder.init().unwrap();
                let mut ranks = [rank as f32];
                world.group().all_reduce(&mut ranks, ReduceOp::Sum).unwrap();
                assert_eq!(ranks, [3.0]);
                world.shutdown().unwrap();
            });
        }
    });
    let job = format!("3/127.1-{port}");
    let read = |key: String| {
        let value = store.get(&key, Duration::from_secs(20)).unwrap();
        String::from_utf8_lossy(&value).into_owned()
    };
    for key in [format!("rcomm/0/run/{job}"), "rcomm/0/all here".to_owned()] {
        let value = read(key);
        let is_secret =
            |line: &str| line.len() == 64 && line.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(!value.lines().any(is_secret), "{value}");
    }
    assert_ne!(
        read(format!("rcomm/0/sealed/{job}/1")),
        read(format!("rcomm/0/sealed/{job}/2"))
    );
}

#[test]
fn a_wrong_secret_is_named_by_the_ranks_that_wait_too() {
    let port = rcomm_tests::process::free_port();
    let rank = |rank, secret: &str| Config {
        secret: Some(rcomm::Secret::from_text(secret)),
        store: StoreChoice::Auto,
        init_timeout: Duration::from_secs(8),
        ..config_at(rendezvous(rank, 2, port))
    };
    let (first, second) = (rank(0, "one"), rank(1, "two"));
    let first = std::thread::spawn(move || refusal(first));
    let error = refusal(second);
    assert_eq!(error.kind(), ErrorKind::Unauthorized, "{error}");
    let error = first.join().unwrap().to_string();
    assert!(error.contains("missing rank 1"), "{error}");
    assert!(
        error.contains("refused 1 connection that did not prove"),
        "{error}"
    );
}

#[test]
fn a_flag_of_an_earlier_attempt_makes_no_dumps_and_hides_no_new_one() {
    let dumps = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    // Rank 5 of the first attempt saw a fault. The agent's store outlives that attempt.
    store.set("exception_dump", &5i32.to_ne_bytes()).unwrap();
    let config = |rank| {
        let mut config = config(rank, 2);
        config.dump_dir = dumps.path().to_owned();
        if let Some(rendezvous) = &mut config.rendezvous {
            rendezvous.attempt = 1;
        }
        config
    };
    let worlds: Vec<World> = std::thread::scope(|scope| {
        let ranks = (0..2).map(|rank| {
            let builder = builder(config(rank), store.clone(), &Carrier::Cpu);
            scope.spawn(move || builder.init().unwrap())
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(!store.check(&["exception_dump"]).unwrap());
    // A rank of PyTorch raises the flag in this attempt: both ranks dump, because of this flag alone.
    store.set("exception_dump", &7i32.to_ne_bytes()).unwrap();
    for (rank, world) in worlds.iter().enumerate() {
        let path = world.dump_dir().join(format!("rank_{rank}.json"));
        let bytes = wait_until("the dump", || std::fs::read(&path).ok());
        let (dump, _) = Dump::read(&bytes).unwrap();
        assert_eq!(dump.identity.reason, "signal of rank 7");
    }
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(|| world.shutdown().unwrap());
        }
    });
}

#[test]
fn an_invalid_list_of_members_or_backend_is_refused() {
    on_threads(
        2,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let refusal = |ranks: &[u32]| {
                let group = world.new_group(ranks, &GroupOptions::named("dp"));
                let error = group.expect_err("no such group");
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                error.to_string()
            };
            let this_rank = world.rank();
            let omitted = format!("group dp: the list omits rank {this_rank}");
            assert!(refusal(&[1 - this_rank]).starts_with(&omitted));
            assert!(refusal(&[this_rank, 7]).contains("rank 7 is not in a world of 2 ranks"));
            assert!(refusal(&[this_rank, this_rank]).contains("listed twice"));
            assert!(refusal(&[]).contains("at least one rank"));
            let unknown = GroupOptions {
                backend: Some("carrier pigeon".to_owned()),
                ..GroupOptions::default()
            };
            let error = world
                .new_group(&[this_rank], &unknown)
                .expect_err("no such backend");
            assert!(
                error.to_string().contains("no backend is called"),
                "{error}"
            );
            world.shutdown().unwrap();
        },
    );
}

#[test]
fn members_that_want_different_backends_are_refused() {
    // The members compare their backends in shared memory, or through the store.
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let fabric = rcomm::FakeFabric::new();
        let errors = on_threads(
            2,
            &Carrier::Fake(fabric),
            |config| config.transport = transport,
            |world| {
                let options = GroupOptions {
                    backend: Some(if world.rank() == 0 { "cpu" } else { "fake" }.to_owned()),
                    ..GroupOptions::named("dp")
                };
                let error = world.new_group(&[0, 1], &options).err();
                world.shutdown().unwrap();
                error
            },
        );
        let mut errors = errors.into_iter().flatten();
        let error = errors.next().expect("one member is refused");
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        let names = |backend: &str, other: &str| {
            let words = format!("wants the backends {backend:?}, another member {other:?}");
            error.to_string().contains(&words)
        };
        assert!(names("cpu", "fake") || names("fake", "cpu"), "{error}");
        assert!(errors.next().is_none());
    }
}

#[test]
fn a_pipe_that_cannot_be_made_does_not_end_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let valid = folder.path().join("dump_");
    let config = Config {
        dump_pipes: vec![folder.path().join("nowhere/dump_"), valid],
        ..config(0, 1)
    };
    let world = builder(config, Arc::new(HashStore::new()), &Carrier::Cpu)
        .init()
        .unwrap();
    assert!(folder.path().join("dump_0.pipe").exists());
    world.shutdown().unwrap();
}

#[test]
fn a_world_that_cannot_be_made_leaves_no_ring() {
    let folder = tempfile::tempdir().unwrap();
    let rings = || {
        let jobs = std::fs::read_dir(folder.path()).unwrap();
        let jobs = jobs.filter_map(|job| std::fs::read_dir(job.unwrap().path()).ok());
        jobs.flatten()
            .map(|file| file.unwrap().path())
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension == "ring")
            })
            .count()
    };
    let config = Config {
        ring_dir: RingDir::Dir(folder.path().to_owned()),
        ..config(0, 1)
    };
    let jobs_seen = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let jobs_in_backend = jobs_seen.clone();
    let path = folder.path().to_owned();
    let world = builder(config, Arc::new(HashStore::new()), &Carrier::Cpu).backend(move |_| {
        let jobs = std::fs::read_dir(path).unwrap().count();
        jobs_in_backend.store(jobs, std::sync::atomic::Ordering::Relaxed);
        Err(Error::new(ErrorKind::Unsupported, "no such device"))
    });
    let error = world.init().expect_err("a backend that cannot be opened");
    assert!(error.to_string().contains("no such device"), "{error}");
    let jobs_seen = jobs_seen.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(
        jobs_seen, 1,
        "no folder for the ring while the backend was opened"
    );
    assert_eq!(rings(), 0);
}

#[test]
fn the_rank_with_the_store_stays_until_the_others_have_asked_for_its_status() {
    let dumps = tempfile::tempdir().unwrap();
    let (first, port) = half_a_job_with(|config| {
        config.dump_dir = dumps.path().to_owned();
        // Rank 0 waits until the other rank has left, however long that takes.
        config.status_wait = Duration::from_secs(60);
    });
    let second = World::init(Config {
        dump_dir: dumps.path().to_owned(),
        ..config_at(rendezvous(1, 2, port))
    })
    .unwrap();
    let first = first.join().unwrap().unwrap();
    let work = std::thread::spawn(move || {
        let mut data = [1.0f32; 8];
        let group = second.group();
        group.all_reduce(&mut data, rcomm::ReduceOp::Sum)
    });
    drop(first);
    let error = work.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("arrived: rank 1"), "{error}");
    assert!(!error.contains("is not known"), "{error}");
}

#[test]
fn dropping_a_world_does_not_wait_for_a_store_that_is_gone() {
    let (first, port) = half_a_job_with(|config| config.status_wait = Duration::from_millis(10));
    let long = Duration::from_secs(3_600);
    let second = World::init(Config {
        init_timeout: long,
        timeout: long,
        status_wait: long,
        ..config_at(rendezvous(1, 2, port))
    })
    .unwrap();
    // This ends the store.
    drop(first.join().unwrap().unwrap());
    wait_until("the store to end", || second.store().check(&["any"]).err());
    drop(second);
}

#[test]
fn all_ranks_use_the_table_of_algorithms_of_rank_0() {
    let only_rank_0 = |config: &mut Config| {
        config.transport = TransportChoice::Tcp;
        if config
            .rendezvous
            .as_ref()
            .is_some_and(|rendezvous| rendezvous.rank == 0)
        {
            let lines = "all_reduce sockets any any exchange; streams 2";
            config.tuning.prepend(lines).unwrap();
        }
    };
    on_threads(3, &Carrier::Cpu, only_rank_0, |world| {
        assert_eq!(world.config().tuning.streams(), 2);
        // Ranks that used different tables would choose different algorithms and fail.
        let mut data = [world.rank()];
        world.group().all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3]);
        world.shutdown().unwrap();
    });
}

#[test]
fn rings_of_dead_jobs_are_removed_also_if_the_lowest_rank_dies_before_it_does_so() {
    let directory = tempfile::tempdir().unwrap();
    let ring = |job: &str| {
        let mut config = RecorderConfig::new(job, 0, 2);
        config.placement = Placement::Dir(directory.path().to_owned());
        FlightRecorder::create(&config).unwrap()
    };
    // Dropping a recorder leaves the ring, as the end of its process does.
    drop(ring("dead"));
    let place = rendezvous(1, 2, 1);
    let lower = ring(&place.job);
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let config = Config {
        init_timeout: Duration::from_secs(2),
        ring_dir: RingDir::Dir(directory.path().to_owned()),
        kept_jobs: KeptJobs {
            jobs: 0,
            ..KeptJobs::default()
        },
        ..config_at(place)
    };
    let builder = World::builder(config).store(store.clone());
    let upper = std::thread::spawn(move || builder.init().map(drop));
    // Rank 1 has checked in and left the removal to rank 0, which dies now.
    let checked_in = ["rcomm/rendezvous/0/job"];
    store.wait(&checked_in, Duration::from_secs(20)).unwrap();
    let dead = directory.path().join("dead");
    assert!(dead.exists());
    drop(lower);
    let error = upper.join().unwrap().expect_err("rank 0 is gone");
    assert_eq!(error.kind(), ErrorKind::Rendezvous, "{error}");
    assert!(!dead.exists());
}
