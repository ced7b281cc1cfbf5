//! Tests groups split off groups, ways to join, shrinking, streams, graphs, memory, NaNs, and the report of NCCL's RAS.

use super::{RANKS, facts, fail, run, start};
use rcomm_recorder::publish::Dump;
use rcomm_tests::process::{CULPRIT, Job};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Command;

/// What follows this word on each line of a rank's output that begins with it.
pub(crate) fn lines<'a>(output: &'a str, word: &str) -> Vec<&'a str> {
    let lines = output.lines().filter_map(|line| line.strip_prefix(word));
    lines.map(str::trim).collect()
}

/// Asserts the output of the scenario `split`, which is the same however the groups are made.
pub(crate) fn check_split(outputs: &[String]) {
    // The even ranks form a group in reverse order; rank 1 has one of its own; rank 3 has none.
    assert_eq!(lines(&outputs[0], "part:"), ["rank 1 of [2, 0], sum 2"]);
    assert_eq!(lines(&outputs[1], "part:"), ["rank 0 of [1], sum 1"]);
    assert_eq!(lines(&outputs[2], "part:"), ["rank 0 of [2, 0], sum 2"]);
    assert!(lines(&outputs[3], "part:").is_empty());
    for (rank, output) in outputs.iter().enumerate() {
        let first = rank / 2 * 2;
        let pair = format!("[{first}, {}], sum 2", first + 1);
        assert_eq!(lines(output, "pair:"), [pair]);
        assert_eq!(lines(output, "alone:"), [format!("[{rank}], sum 1")]);
        let listed: &[&str] = if rank < 2 { &["[1, 0], sum 2"] } else { &[] };
        assert_eq!(lines(output, "listed:"), listed);
        assert_eq!(lines(output, "all:"), ["sum 4"]);
    }
}

#[test]
fn groups_are_split_off_one_another() {
    let (_job, outputs) = run("split", |_, _| {});
    check_split(&outputs);
    let ids = |rank: usize| -> Vec<String> {
        let states = lines(&outputs[rank], "communicator");
        let ids = states.iter().filter_map(|state| state.split_once(':'));
        ids.map(|(id, _)| id.to_owned()).collect()
    };
    // Each rank prints the ids of all its communicators; a communicator has the same id on each of its ranks.
    assert_eq!(ids(0).len(), 5, "{}", outputs[0]);
    assert_eq!(ids(3).len(), 3, "{}", outputs[3]);
    assert_eq!(ids(0)[1], ids(2)[1]);
    // The group of all ranks was split three times: into parts, into pairs, and by a list.
    for output in &outputs {
        assert_eq!(lines(output, "splits:"), ["3"], "{output}");
        let states = lines(output, "communicator");
        let count = r#"("split_count", "3")"#;
        assert!(states.iter().any(|state| state.contains(count)), "{output}");
    }
    assert_ne!(ids(0)[1], ids(1)[1]);
}

#[test]
fn the_number_of_a_communicator_is_read_where_the_library_states_it_and_else_computed() {
    // The simulator's own formula is that of NCCL 2.30.7. With `comm_hash`, communicators that were joined have the
    // number 77, those that were split off them 78, and those that were split off these 79.
    let (_folder, lacking) = super::libraries::without(&["ncclCommQueryProperties"]);
    let current = rcomm_tests::simulator::path();
    let jobs = [
        (&current, "version=23102,comm_hash=77", "0", true),
        (&current, "version=23102,comm_hash=77", "1", true),
        (&current, "version=23102,comm_hash=0", "1", false),
        (&current, "version=23007,comm_hash=77", "1", false),
        (&lacking, "version=23102,comm_hash=77", "1", false),
    ];
    for (library, faults, blocking, is_read) in jobs {
        let (_job, outputs) = run("split", |_, command| {
            super::over(library, command);
            command
                .env("RCOMM_SIM", faults)
                .env("RCOMM_NCCL_BLOCKING", blocking);
        });
        let mut firsts = Vec::new();
        for output in &outputs {
            let states = lines(output, "communicator");
            let ids = states.iter().filter_map(|state| state.split_once(':'));
            let number = |id: &str| u64::from_str_radix(id.strip_prefix("0x")?, 16).ok();
            let ids: Vec<u64> = ids.map(|(id, _)| number(id).unwrap()).collect();
            assert!(ids.len() >= 3, "{faults}: {output}");
            let given = ids.iter().filter(|id| (77..=79).contains(*id)).count();
            let expected = if is_read { ids.len() } else { 0 };
            assert_eq!(given, expected, "{faults}, {blocking}: {ids:?}");
            assert_eq!(ids[0] == 77, is_read, "{faults}, {blocking}: {ids:?}");
            firsts.push(ids[0]);
        }
        // All members have one number, computed or read.
        assert_eq!(firsts, [firsts[0]; 4], "{faults}, {blocking}");
    }
}

#[test]
fn groups_work_with_every_setting_of_how_ranks_join() {
    for variables in [
        &[("RCOMM_NCCL_BLOCKING", "1")][..],
        &[
            ("TORCH_NCCL_USE_COMM_NONBLOCKING", "0"),
            ("RCOMM_NCCL_LAZY", "1"),
        ][..],
        &[("RCOMM_NCCL_LAZY", "1")][..],
        &[("TORCH_NCCL_RANKS_PER_ROOT", "1")][..],
        &[
            ("RCOMM_NCCL_RANKS_PER_ID", "3"),
            ("TORCH_NCCL_HIGH_PRIORITY", "1"),
        ][..],
        &[("RCOMM_NCCL_TIMING", "1")][..],
    ] {
        let (_job, outputs) = run("split", |_, command| {
            command.envs(variables.iter().copied());
        });
        check_split(&outputs);
    }
}

/// Asserts the output of the remaining ranks of the scenario `shrink`, and returns it.
pub(crate) fn check_shrink(job: &mut Job) -> Vec<String> {
    let others = (0..RANKS).filter(|&rank| rank != CULPRIT);
    let outputs = others.map(|rank| {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let output = ended.stderr;
        assert!(output.contains("lost: all_reduce #4"), "{output}");
        let sums = lines(&output, "sum:");
        assert_eq!(sums[..3], ["4 of ranks [0, 1, 2, 3]"; 3], "{output}");
        assert_eq!(sums[3..], ["3 of ranks [0, 1, 3]"; 3], "{output}");
        output
    });
    let outputs = outputs.collect();
    assert!(!job.wait(CULPRIT).status.success());
    outputs
}

#[test]
fn the_remaining_ranks_continue_on_a_shrunk_communicator() {
    for mode in ["clean_up_only", "none"] {
        let mut job = start("shrink", |_, command| {
            command
                .env("RCOMM_NCCL_ERROR_HANDLING", mode)
                // The end of the process is noticed at the time-out, and not by a connection.
                .env("RCOMM_SIM", "local_peers=1")
                .env("RCOMM_TIMEOUT_MS", "5000");
        });
        let outputs = check_shrink(&mut job);
        // The rank that was killed has left no dump, but a ring with the number of its communicator.
        let id = |dump: &Dump| dump.nccl_comm_state[0].0.clone();
        assert_eq!(
            id(&job.ring(CULPRIT).snapshot()),
            id(&job.dumps()[0].1),
            "{mode}"
        );
        for output in outputs {
            assert!(output.contains("end of keys"), "{mode}: {output}");
            // Only the note stays that a rank has given up the first group, for a rank that comes late to it, with the
            // count of the ranks that no longer need it.
            let is_note = |key: &&str| {
                key.ends_with("/nccl/given-up") || key.ends_with("/nccl/given-up/left")
            };
            assert!(
                lines(&output, "key:").iter().all(is_note),
                "{mode}: {output}"
            );
            // The dump has the communicator of the three remaining ranks.
            let states = lines(&output, "communicator");
            assert!(
                states.iter().any(|state| state.contains("\"3\"")),
                "{mode}: {output}"
            );
        }
    }
}

#[test]
fn the_remaining_ranks_make_a_new_communicator_after_a_connection_error() {
    // The library derives no communicator from one with a connection error, revoked or not.
    let mut job = start("shrink", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    check_shrink(&mut job);
}

#[test]
fn streams_wait_for_operations_and_operations_for_streams() {
    let (_job, outputs) = run("streams", |_, _| {});
    for output in outputs {
        let refused = lines(&output, "refused:");
        let factor = "the factor Double[1] on cuda is of another type than Float[100] on cuda";
        assert!(refused[0].contains(factor), "{output}");
        assert!(refused[1].contains("runs on no stream"), "{output}");
    }
}

#[test]
fn operations_are_captured_into_graphs() {
    let (job, outputs) = run("graph", |_, _| {});
    for (path, dump) in job.dumps() {
        // Graph 1 is the first capture of the process, without the refused operations. Graphs 2 and 3 are the capture
        // whose memory the graph keeps, and the one that is not joined.
        let in_graph = |graph: Option<u64>| -> Vec<u64> {
            let entries = dump.entries.iter().filter(|entry| entry.graph_id == graph);
            entries.map(|entry| entry.collective_seq_id).collect()
        };
        assert_eq!(in_graph(Some(1)), [2, 3, 5, 6], "{}", path.display());
        for other in [2, 3] {
            assert_eq!(in_graph(Some(other)).len(), 1, "{}", path.display());
        }
        let outside = in_graph(None);
        assert!(outside.contains(&1) && outside.len() > 3, "{outside:?}");
        assert_eq!(outside.len() + 6, dump.entries.len());
    }
    for output in outputs {
        let refused = lines(&output, "refused:");
        assert!(
            refused[0].contains("is being captured into graph"),
            "{output}"
        );
        assert!(
            refused[1].contains("would fill new memory with zeros"),
            "{output}"
        );
        const UNJOINED: &str = "904";
        assert_eq!(lines(&output, "not joined:"), [UNJOINED]);
        let states = lines(&output, "communicator");
        // The captured operations are stated with their numbers in the record.
        assert!(states[0].contains("\"4 operations, #2 to #6\""), "{output}");
    }
}

#[test]
fn two_ranks_on_one_device_are_named_on_all_unless_that_is_allowed() {
    let share_device = |rank: u32, command: &mut Command| {
        let device = if rank == CULPRIT { 0 } else { rank };
        command
            .env("RCOMM_CUDA_DEVICE", device.to_string())
            // Each rank stays until all have reported their status.
            .env("RCOMM_STATUS_WAIT_MS", "20000");
    };
    for (rank, ended) in fail(start("train", share_device), 0..RANKS).1 {
        let error = ended.stderr;
        assert!(
            error.contains("rank 0 (cuda:0) and rank 2 (cuda:0) use the same device"),
            "rank {rank}: {error}"
        );
    }
    let (_job, outputs) = run("train", |rank, command| {
        share_device(rank, command);
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    });
    for output in outputs {
        assert_eq!(lines(&output, "sum:"), ["4"; 6], "{output}");
    }
}

#[test]
fn memory_of_the_groups_device_is_registered_and_other_memory_is_refused() {
    let (_job, outputs) = run("memory", |_, _| {});
    for (rank, output) in outputs.iter().enumerate() {
        let next = (rank + 1) % 8;
        for sentence in [
            "refused what was undone: there is no registration",
            "it is host memory; on this rank the group works on",
            &format!("it is memory of cuda:{next}; on this rank the group works on cuda:{rank}"),
            "it is host memory, or no memory at all",
        ] {
            assert!(output.contains(sentence), "{sentence}: {output}");
        }
    }
}

#[test]
fn a_nan_in_device_memory_is_refused_on_all_ranks() {
    let job = start("nan", |_, command| {
        command
            .env("TORCH_NCCL_NAN_CHECK", "1")
            .env("RCOMM_TIMEOUT_MS", "20000");
    });
    for (rank, ended) in fail(job, 0..RANKS).1 {
        let error = ended.stderr;
        assert!(error.contains("all_reduce #2"), "rank {rank}: {error}");
        assert!(
            error.contains("NaN") && error.contains("999999"),
            "rank {rank}: {error}"
        );
        assert!(error.contains("rank 2"), "rank {rank}: {error}");
    }
}

#[test]
fn the_monitors_report_is_part_of_the_dumps_of_the_first_and_the_last_rank() {
    let monitor = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = monitor.local_addr().unwrap().to_string();
    let answer = |stream: std::net::TcpStream| {
        let mut lines = BufReader::new(stream);
        // All answers are sent at once: a dump waits a second for all of them together.
        let answers = "SERVER PROTOCOL 2\nOK\nOK\n{\"nccl_version\": \"2.30.7\"}";
        lines.get_mut().write_all(answers.as_bytes()).unwrap();
        let mut line = String::new();
        for question in [
            "CLIENT PROTOCOL 2",
            "TIMEOUT 5",
            "SET FORMAT json",
            "VERBOSE STATUS",
        ] {
            line.clear();
            lines.read_line(&mut line).unwrap();
            assert_eq!(line.trim_end(), question);
        }
    };
    // The first rank and the last one ask.
    let serve = std::thread::spawn(move || {
        for _ in 0..2 {
            answer(monitor.accept().unwrap().0);
        }
    });
    let (job, _) = run("graph", |_, command| {
        command
            .env("RCOMM_NCCL_RAS", "1")
            .env("NCCL_RAS_ADDR", &address);
    });
    serve.join().unwrap();
    for (path, dump) in job.dumps() {
        let reports = facts(&dump, "report");
        let expected: &[&str] = match dump.identity.rank {
            Some(0 | 3) => &["{\"nccl_version\": \"2.30.7\"}"],
            _ => &[],
        };
        assert_eq!(reports, expected, "{}", path.display());
    }
}
