//! The records of an earlier job beside those of the one that is judged.

use crate::generator::Random;
use crate::hunt::job::{Job, Records, SECOND};
use crate::hunt::{Case, Class, Look};
use rcomm_analyzer::{Extent, RecordFile};
use rcomm_recorder::publish::Dump;

/// Adds the records that an earlier job has left in the same folder: those that the later one did not replace, or all
/// in a folder of their own. Where the later one has left none, the earlier one is the job that is judged.
pub(super) fn add_earlier(case: &mut Case, random: &mut Random) {
    let job = &case.job;
    let same_size = random.chance(0.6);
    let mut seed = job.seed ^ 0x6561_726c;
    let earlier = loop {
        seed += 1;
        let other = Job::draw(seed);
        let is_alike = other.backend == job.backend && other.records == job.records;
        if !is_alike || (other.world() == job.world()) != same_size {
            continue;
        }
        let earlier = Case::of_job(other, Class::Any, random);
        // No process of the earlier job is left when the later one starts.
        let is_gone = earlier.look == Look::After && earlier.truth.is_over;
        if job.records != Records::Rings || is_gone {
            break earlier;
        }
    };
    if case.dumps.is_empty() {
        *case = Case {
            class: Class::Attempts,
            ..earlier
        };
        return;
    }
    let gap = *random.pick(&[3, 20, 300, 7200, 200_000]) * SECOND;
    let back = earlier.history.last.max(earlier.moment) + 25 * SECOND + gap;
    let apart = random.chance(0.3);
    if apart {
        for name in &mut case.names {
            *name = format!("run_2/{name}");
        }
    }
    let named = random.chance(0.5).then(|| "earlier".to_owned());
    let has_times = !case.policy.files.is_empty();
    for (index, mut dump) in earlier.dumps.into_iter().enumerate() {
        let name = match (apart, job.records) {
            (true, _) => format!("run_1/{}", earlier.names[index]),
            // Each process has a ring of its own.
            (false, Records::Rings) => format!("earlier_{}", earlier.names[index]),
            (false, _) => earlier.names[index].clone(),
        };
        if case.names.contains(&name) {
            continue;
        }
        shift(&mut dump, back);
        if job.records == Records::Rings {
            dump.identity.pid += 5000;
            if let Some(named) = &named {
                dump.identity.job.clone_from(named);
            }
        }
        case.names.push(name);
        case.dumps.push(dump);
        let file = earlier.policy.files.get(index);
        let written = file.and_then(|file| file.written_ns);
        if has_times {
            case.policy.files.push(RecordFile {
                written_ns: written.map(|ns| ns - back),
                extent: Extent::Whole,
            });
        }
    }
}

/// Moves all times of a record into the past.
fn shift(dump: &mut Dump, back: i64) {
    let earlier = |ns: &mut i64| {
        if *ns > 0 {
            *ns -= back;
        }
    };
    for entry in &mut dump.entries {
        earlier(&mut entry.time_created_ns);
        earlier(&mut entry.time_discovered_started_ns);
        earlier(&mut entry.time_discovered_completed_ns);
    }
    for failure in &mut dump.failures {
        earlier(&mut failure.time_ns);
    }
    earlier(&mut dump.identity.dump_time_ns);
    earlier(&mut dump.identity.begun_ns);
    earlier(&mut dump.closed_ns);
    if let Some(status) = &mut dump.status {
        earlier(&mut status.heartbeat_ns);
        earlier(&mut status.phase_since_ns);
        if let Some(exit) = &mut status.exit {
            earlier(&mut exit.time_ns);
        }
    }
}
