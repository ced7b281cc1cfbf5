//! Every backend computes what a scalar reference without ranks computes, or refuses what its library lacks: for all
//! collectives and messages, all element types, some lengths and two orders of ranks, blocking or not.
#![allow(clippy::unwrap_used)]

mod cases;
mod issued;
mod limits;
mod scalar;

use cases::Cases;
use proptest::prelude::*;
use rcomm::{Complex, Config, F8E4M3, F8E5M2, FakeFabric, GroupOptions, World, bf16, f16};
use rcomm_tests::fault::Fault;
use rcomm_tests::process::Job;
use rcomm_tests::simulator;
use rcomm_tests::world::{Carrier, on_threads, over_nccl};

fn carriers() -> [Carrier; 3] {
    [
        Carrier::Cpu,
        Carrier::Registered,
        Carrier::Fake(FakeFabric::new()),
    ]
}

/// Checks every operation on every type, in this world's group and in one whose ranks are in reverse order; returns the
/// number of cases.
fn check_all_types(world: &World, len: usize) -> u64 {
    let reversed: Vec<u32> = (0..world.size()).rev().collect();
    let reversed = world.new_group(&reversed, &GroupOptions::named("reversed"));
    let mut checked = 0;
    for group in [world.group().clone(), reversed.unwrap()] {
        let mut cases = Cases::new(&group, len, 7);
        macro_rules! check {
            ($($type:ty),+) => {
                $( cases.check::<$type>(); cases.check_issued::<$type>(); )+
            };
        }
        check!(
            f32,
            f64,
            f16,
            bf16,
            i8,
            u8,
            i16,
            u16,
            i32,
            i64,
            u32,
            u64,
            bool,
            Complex<f32>,
            Complex<f64>,
            F8E4M3,
            F8E5M2
        );
        cases.check_messages();
        checked += cases.checked();
    }
    checked
}

#[test]
fn every_backend_computes_what_the_reference_computes() {
    let mut checked = 0;
    for carrier in carriers() {
        for world_size in [1, 2, 3, 5] {
            for len in [0, 1, 33] {
                let counts = on_threads(
                    world_size,
                    &carrier,
                    |_| {},
                    |world| {
                        let count = check_all_types(&world, len);
                        world.shutdown().unwrap();
                        count
                    },
                );
                checked += counts[0];
            }
        }
    }
    eprintln!("{checked} cases");
    // Otherwise a list of cases that has become shorter would go unnoticed.
    assert!(checked >= 3 * 4 * 3 * 2 * 17 * 60, "only {checked} cases");
}

/// Returns a change of the configuration that puts at most this many ranks on each host. Ranks of different hosts share
/// no memory.
fn hosts_of(ranks: u32) -> impl Fn(&mut Config) {
    move |config| {
        let rendezvous = config.rendezvous.as_ref().unwrap();
        config.host_id = Some((rendezvous.rank / ranks).to_string());
    }
}

#[test]
fn ranks_of_several_hosts_compute_what_the_reference_computes() {
    for (ranks, len) in [(2, 33), (3, 1)] {
        let carrier = Carrier::Cpu;
        on_threads(5, &carrier, hosts_of(ranks), |world| {
            assert!(check_all_types(&world, len) >= 2 * 17 * 60);
            world.shutdown().unwrap();
        });
    }
    on_threads(5, &Carrier::Cpu, hosts_of(2), |world| {
        let mut cases = Cases::new(world.group(), 40_009, 5);
        cases.check::<f32>();
        cases.check::<u8>();
        cases.check::<bf16>();
        world.shutdown().unwrap();
    });
}

#[test]
fn thirty_two_ranks_compute_what_the_reference_computes() {
    let counts = on_threads(
        32,
        &Carrier::Cpu,
        |_| {},
        |world| {
            let count = check_all_types(&world, 5);
            world.shutdown().unwrap();
            count
        },
    );
    eprintln!("{} cases on each of 32 ranks", counts[0]);
    assert!(
        counts.iter().all(|&count| count >= 2 * 17 * 60),
        "{counts:?}"
    );
}

#[test]
fn long_buffers_give_what_the_reference_computes() {
    for carrier in carriers() {
        on_threads(
            3,
            &carrier,
            |_| {},
            |world| {
                let mut cases = Cases::new(world.group(), 40_009, 5);
                cases.check::<f32>();
                cases.check::<u8>();
                world.shutdown().unwrap();
            },
        );
    }
}

/// One rank of the next test, in a separate process.
#[test]
#[ignore = "a rank of nccl_on_the_simulator_computes_what_the_reference_computes"]
fn rank_over_nccl() {
    let config = Config::from_environment().unwrap();
    let world = over_nccl(config).init().unwrap();
    let checked = check_all_types(&world, 33);
    let mut cases = Cases::new(world.group(), 0, 11);
    cases.check::<f32>();
    let mut long = Cases::new(world.group(), 40_009, 5);
    long.check::<f32>();
    let total = checked + cases.checked() + long.checked();
    eprintln!("{total} cases");
    world.shutdown().unwrap();
}

#[test]
fn nccl_on_the_simulator_computes_what_the_reference_computes() {
    let program = std::env::current_exe().unwrap();
    let simulator = simulator::path();
    // Communicators block in the first mode and do not in the second.
    let modes = ["1", "0"].map(|blocking| [1, 2, 4, 8].map(|ranks| (ranks, blocking)));
    for (ranks, blocking) in modes.into_iter().flatten() {
        let program = program.to_str().unwrap();
        let mut job = Job::start(program, ranks, Fault::None, |_, command| {
            command
                .args(["--exact", "rank_over_nccl", "--ignored", "--nocapture"])
                .env("RCOMM_NCCL_LIB", &simulator)
                .env("RCOMM_CUDA_LIB", &simulator)
                .env("RCOMM_NCCL_BLOCKING", blocking)
                .env("RCOMM_TIMEOUT_MS", "60000");
        });
        let mut checked = 0;
        for rank in 0..ranks {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank} of {ranks}: {ended:?}");
            let count = ended
                .stderr
                .lines()
                .find_map(|line| line.strip_suffix(" cases"));
            checked += count.unwrap().parse::<u64>().unwrap();
        }
        eprintln!("nccl on the simulator, blocking {blocking}: {ranks} ranks, {checked} cases");
        assert!(
            checked >= 2 * 17 * 40 * u64::from(ranks),
            "only {checked} cases"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    #[test]
    fn random_sizes_lengths_and_contents_give_what_the_reference_computes(
        world_size in 1u32..7,
        len in 0usize..800,
        seed in any::<u64>(),
    ) {
        for carrier in carriers() {
            on_threads(world_size, &carrier, |_| {}, |world| {
                let mut cases = Cases::new(world.group(), len, seed);
                cases.check::<i64>();
                cases.check_issued::<bf16>();
                cases.check_messages();
                world.shutdown().unwrap();
            });
        }
    }
}
