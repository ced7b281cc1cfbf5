//! Measures the costs of the view: the time of a scrape of a large job, and the CPU time spent without viewers.
//!
//! ```text
//! cargo bench -p rcomm-web --bench cost
//! ```
#![allow(clippy::print_stdout)]

use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{RingSource, SimulatedSource, Source};
use rcomm_analyzer::{LiveOptions, Pace};
use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use rcomm_web::{Exemplars, Form, SnapshotStore};
use std::time::{Duration, Instant};

const RANKS: u32 = 8;
/// The duration of each measurement of CPU time.
const MEASURED: Duration = Duration::from_secs(10);

fn main() {
    scrape();
    watch_rings();
}

/// Prints how long it takes to write all metrics of 1,024 ranks in each form, and how many bytes they have.
fn scrape() {
    let simulation = Simulation::new(Situation::StuckRank, 1024, 0);
    let ns = simulation.fault_ns() + 8_000_000_000;
    let source: Box<dyn Source> = Box::new(SimulatedSource::new(simulation, move || ns));
    let options = LiveOptions::post_mortem();
    let (store, watch) =
        SnapshotStore::watch(vec![source], options, Pace::default()).expect("the threads start");
    while store.newest().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    for form in [Form::Text, Form::OpenMetrics] {
        let mut bytes = 0;
        let mut times: Vec<Duration> = (0..50)
            .map(|_| {
                let began = Instant::now();
                bytes = store.metrics(form, Exemplars::OfTraces).len();
                began.elapsed()
            })
            .collect();
        times.sort();
        println!(
            "scrape of 1024 ranks, {form:?}: median {:?}, max {:?}, {bytes} bytes",
            times[25], times[49]
        );
    }
    watch.stop();
}

/// CPU time of this process so far, user and system, in clock ticks of 1/100 s.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let mut fields = fields.split_whitespace().skip(11);
    let mut next = || {
        fields
            .next()
            .and_then(|it| it.parse::<u64>().ok())
            .unwrap_or(0)
    };
    next() + next()
}

/// Prints the CPU time of watching eight rings at the default pace: while nothing happens, and while each rank issues
/// 100 operations a second, whose own cost is included.
fn watch_rings() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let recorders: Vec<FlightRecorder> = (0..RANKS)
        .map(|rank| {
            let mut config = RecorderConfig::new("bench", rank, RANKS);
            config.placement = Placement::Dir(folder.path().to_owned());
            FlightRecorder::create(&config).expect("a ring can be made")
        })
        .collect();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".into(),
        desc: "default_pg".into(),
        ranks: (0..RANKS).collect(),
    };
    let handles: Vec<_> = recorders
        .iter()
        .map(|recorder| {
            let group = recorder.add_group(&info, Duration::from_secs(60));
            let key = SignatureKey {
                backend: "cpu",
                op_name: "barrier",
                ..SignatureKey::default()
            };
            (
                group,
                SignatureRef::Id(recorder.intern(&key).expect("a fresh table has free slots")),
            )
        })
        .collect();
    let mut seq = 0;
    let mut issue = || {
        seq += 1;
        for (recorder, (group, signature)) in recorders.iter().zip(&handles) {
            let record = recorder.begin(&Operation {
                collective_seq_id: seq,
                ..Operation::new(*group, OpType::Barrier, *signature)
            });
            recorder.completed(record);
        }
    };
    // The rings are full before the measurements.
    for _ in 0..20_000 {
        issue();
    }
    let rings: Box<dyn Source> = Box::new(RingSource::new(folder.path().to_owned(), None));
    let (store, watch) = SnapshotStore::watch(vec![rings], LiveOptions::default(), Pace::default())
        .expect("the threads start");
    while store.newest().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    for (what, issue_interval) in [
        ("nothing happens", None),
        (
            "100 operations a second on each rank",
            Some(Duration::from_millis(10)),
        ),
    ] {
        let (began, before) = (Instant::now(), ticks());
        while began.elapsed() < MEASURED {
            std::thread::sleep(issue_interval.unwrap_or(MEASURED));
            if issue_interval.is_some() {
                issue();
            }
        }
        let share = (ticks() - before) as f64 / began.elapsed().as_secs_f64();
        println!("{RANKS} ranks, {what}: {share:.2} % of a core");
    }
    watch.stop();
}
