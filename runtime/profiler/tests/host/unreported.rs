//! Tests operations of which NCCL does not report all channels, although the device has carried them out. This was seen
//! with NCCL 2.30.7 on a device that four processes shared.

use crate::faults::{COUNT, PROFILER_VERSIONS, all, first, judge, one_channel_stuck, with_one};
use crate::job::{FIRST, Job, Until, operation};
use crate::library::{Call, NONE, Plugin};
use crate::life::{assert_passes, job_rings};
use rcomm_analyzer::{Code, Verdict};
use rcomm_recorder::model::EntryState;

/// Values of [`FIRST`]: of the last channel of rank 1's first operation NCCL reports nothing, or not the end.
const FIRST_OF_RANK_1: [&str; 2] = ["1 one_channel_unreported", "1 one_end_unreported"];

#[test]
fn a_later_operation_ends_one_of_which_a_channel_is_not_reported() {
    for version in PROFILER_VERSIONS {
        for words in FIRST_OF_RANK_1 {
            let case = format!("version {version}, {words}");
            let mut job = Job::start(version, all(Until::Done), |command| {
                command.env(FIRST, words);
            });
            for dump in job.dumps() {
                let mut entries = dump.entries.iter();
                assert!(entries.all(|it| it.retired), "{case}: {dump:?}");
            }
            let report = judge(&job);
            assert_eq!(report.verdict, Verdict::Healthy, "{case}: {report:?}");
            // A process that exits with 0 removes its ring only if it has no operation in progress.
            job.close();
            assert_eq!(job.dumps().len(), 0, "{case}");
        }
    }
}

#[test]
fn a_hang_after_an_operation_with_an_unreported_channel_is_found() {
    for version in PROFILER_VERSIONS {
        for words in FIRST_OF_RANK_1 {
            let case = format!("version {version}, {words}");
            let job = Job::start(version, one_channel_stuck(), |command| {
                command.env(FIRST, words);
            });
            let report = judge(&job);
            let (code, _, sentence) = first(&report);
            assert_eq!(code, Code::E135, "{case}: {sentence}");
            assert!(sentence.contains("all_reduce #6"), "{case}: {sentence}");
            assert!(
                sentence.contains("channel 3 from rank 1"),
                "{case}: {sentence}"
            );
        }
    }
}

#[test]
fn a_process_that_ended_with_an_unreported_channel_in_its_last_operation_is_not_stuck() {
    for version in [4, 6] {
        let last = with_one(1, Until::OneChannelUnreported, Until::Done);
        let mut job = Job::start(version, last, |_| {});
        job.close();
        // Nothing distinguishes this operation from one that an abort has ended, so the ring stays.
        let left = job.dumps();
        assert!(
            left.iter().any(|it| it.identity.rank == Some(1)),
            "{version}"
        );
        let report = judge(&job);
        let case = format!("version {version}: {report:?}");
        assert!(
            !matches!(report.verdict, Verdict::Stuck | Verdict::Mismatch),
            "{case}"
        );
        let mut accused = report
            .findings
            .iter()
            .flat_map(|it| it.culprit_ranks.iter());
        assert_eq!(accused.next(), None, "{case}");
    }
}

#[test]
fn operations_of_one_plan_and_of_other_communicators_do_not_end_each_other() {
    for version in PROFILER_VERSIONS {
        assert_passes(&format!("plans-{version}"), |_| {});
    }
}

/// Reports two operations in one plan, which the device carries out side by side, and then one operation in each of two
/// later plans. Asserts that an operation whose end is not reported ends once an operation of a later plan of its
/// communicator has ended, but not with the other operation of its plan or with those of another communicator.
pub(crate) fn plans(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    let other = plugin.init(Some("o"), 8, 0, 2).expect("a communicator");
    let call = Call::all_reduce(COUNT, 1);
    let in_plan = |calls: usize| {
        let group = match plugin.has_calls() {
            true => plugin.group_api(&comm),
            false => NONE,
        };
        let called: Vec<_> = (0..calls)
            .map(|_| match plugin.has_calls() {
                true => plugin.call(&comm, group, &call, false),
                false => NONE,
            })
            .collect();
        called.iter().for_each(|&called| plugin.stop(called));
        let plan = plugin.plan(&comm);
        let tasks: Vec<_> = called
            .iter()
            .map(|&called| plugin.task_of(&comm, plan, called, &call))
            .collect();
        tasks.iter().for_each(|&task| plugin.stop(task));
        plugin.stop(plan);
        plugin.stop(group);
        tasks
    };
    let states = || {
        let [ring] = &job_rings()[..] else {
            panic!("not exactly one ring");
        };
        let comm_entries = ring.entries.iter().filter(|it| it.group == 0);
        comm_entries.map(|it| it.state).collect::<Vec<_>>()
    };
    let tasks = in_plan(2);
    let kernels = [0, 1].map(|at| plugin.kernel(&comm, tasks[at], at as u8, 1));
    plugin.kernel_ends(kernels[1], 2);
    let (runs, done) = (EntryState::Started, EntryState::Completed);
    assert_eq!(states(), [runs, done]);
    // Operations of another communicator change nothing.
    (0..3).for_each(|_| operation(plugin, &other, &call, Until::Done));
    assert_eq!(states(), [runs, done]);
    let next = in_plan(1);
    let kernel = plugin.kernel(&comm, next[0], 0, 3);
    assert_eq!(states(), [runs, done, runs]);
    plugin.kernel_ends(kernel, 4);
    assert_eq!(states(), [done, done, done]);
    // A report of an operation that has been ended already changes no other operation.
    let next = in_plan(1);
    plugin.kernel_ends(kernels[0], 5);
    assert_eq!(states()[3], EntryState::Scheduled);
    let kernel = plugin.kernel(&comm, next[0], 0, 6);
    plugin.kernel_ends(kernel, 7);
    assert_eq!(states(), [done; 4]);
}
