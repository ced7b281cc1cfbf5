//! The live verdict at a moment equals the verdict on dumps taken at that moment.

mod common;

use common::moment;
use proptest::prelude::*;
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{SimulatedSource, Source};
use rcomm_analyzer::{Live, LiveOptions, Verdict, analyze};
use std::time::Instant;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_last_live_report_agrees_with_an_analysis_of_dumps_of_that_moment(
        situation in prop::sample::select(vec![
            Situation::Healthy,
            Situation::StuckRank,
            Situation::Deadlock,
            Situation::Mismatch,
            Situation::Straggler,
        ]),
        // When the job is looked at, ms after the fault; before it if negative.
        looks_ms in prop::collection::vec(-3_000i64..30_000, 1..5),
    ) {
        let simulation = Simulation::new(situation, 16, common::START_NS).with_window(64);
        let mut looks_ms = looks_ms;
        looks_ms.sort_unstable();
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
        let mut source = {
            let mut times_ms = looks_ms.clone().into_iter();
            let fault = simulation.fault_ns();
            SimulatedSource::new(simulation.clone(), move || {
                fault + times_ms.next().expect("there is a time for each read") * 1_000_000
            })
        };
        let mut newest = None;
        let mut now = 0;
        for ms in looks_ms {
            now = simulation.fault_ns() + ms * 1_000_000;
            let at = moment(&simulation, now);
            live.observe(0, source.poll(Instant::now()), at);
            newest = live.refresh(at).map(|snapshot| snapshot.report).or(newest);
        }
        let live_report = newest.expect("the first read gives a report");
        let mut policy = LiveOptions::default().policy;
        policy.now_ns = Some(now);
        policy.world_size = Some(16);
        let dumps = simulation.dumps_at(now);
        let expected = analyze(&dumps, &policy);
        // The last report may be of an earlier look and give other ages, so only verdict, codes and culprits are
        // compared.
        let verdicts = (live_report.verdict, expected.verdict);
        // A live view calls a healthy job running for some seconds after its last operation.
        let is_same = verdicts.0 == verdicts.1 || verdicts == (Verdict::Running, Verdict::Healthy);
        prop_assert!(is_same, "{:?}: {:?}", situation, verdicts);
        let culprits = |report: &rcomm_analyzer::Report| -> Vec<_> {
            report.findings.iter().map(|f| (f.code, f.culprit_ranks.clone())).collect()
        };
        prop_assert_eq!(culprits(&live_report), culprits(&expected), "{:?}", situation);
    }
}
