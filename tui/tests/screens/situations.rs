//! The verdicts on the recorded situations, and how these are recorded anew.

use super::common::{LATER_S, fixture, judged, simulation};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{Code, Verdict};
use std::sync::Arc;

#[test]
fn every_situation_gets_its_verdict() {
    for &(situation, name) in Situation::ALL {
        let simulation = simulation(situation);
        let snapshot = judged(&simulation, simulation.fault_ns() + 30_000_000_000);
        let report = &snapshot.report;
        let codes: Vec<Code> = report.findings.iter().map(|f| f.code).collect();
        let (verdict, code): (&[Verdict], Option<Code>) = match situation {
            Situation::Healthy => (&[Verdict::Healthy, Verdict::Running], None),
            Situation::StuckRank => (&[Verdict::Stuck], Some(Code::E101)),
            Situation::Deadlock => (&[Verdict::Stuck], None),
            Situation::Mismatch => (&[Verdict::Mismatch], Some(Code::E110)),
            Situation::Straggler => (&[Verdict::Slow], Some(Code::W220)),
            Situation::SilentRank => (&[Verdict::Healthy, Verdict::Running], Some(Code::W150)),
        };
        assert!(
            verdict.contains(&report.verdict),
            "{name}: {:?} {codes:?}",
            report.verdict
        );
        if situation == Situation::Healthy {
            assert!(codes.is_empty(), "{codes:?}");
        }
        if let Some(code) = code {
            assert_eq!(codes.first(), Some(&code), "{name}: {codes:?}");
            let culprits = &report.findings[0].culprit_ranks;
            assert!(
                culprits.contains(&simulation.culprit()),
                "{name}: {culprits:?}"
            );
        }
        if situation == Situation::Deadlock {
            let named = report.findings.iter().any(|f| {
                f.culprit_ranks.contains(&simulation.culprit())
                    || f.cycle.contains(&simulation.culprit())
            });
            assert!(named, "{:#?}", report.findings);
        }
    }
}

#[test]
#[ignore = "writes the recorded reports anew"]
fn rewrite_the_recorded_situations() {
    for &(situation, _) in Situation::ALL {
        let simulation = simulation(situation);
        let now = simulation.fault_ns() + LATER_S * 1_000_000_000;
        let report: Arc<_> = judged(&simulation, now).report;
        let text = serde_json::to_string_pretty(report.as_ref())
            .expect("the report can be written as JSON");
        std::fs::write(fixture(situation), text + "\n").expect("the fixture is writable");
    }
}
