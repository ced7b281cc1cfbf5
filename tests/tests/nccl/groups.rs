//! Groups of groups, ways to join, streams, graphs and memory.

use super::{RANKS, facts, fail, run, start};
use rcomm_tests::process::{CULPRIT, Job};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Command;

/// The lines of a rank's output that begin with this word.
pub(crate) fn lines<'a>(said: &'a str, word: &str) -> Vec<&'a str> {
    let lines = said.lines().filter_map(|line| line.strip_prefix(word));
    lines.map(str::trim).collect()
}

/// The scenario's output, however the groups were made.
pub(crate) fn check_split(said: &[String]) {
    // Even ranks in reverse order, odd ones but the last as they are.
    assert_eq!(lines(&said[0], "part:"), ["rank 1 of [2, 0], sum 2"]);
    assert_eq!(lines(&said[1], "part:"), ["rank 0 of [1], sum 1"]);
    assert_eq!(lines(&said[2], "part:"), ["rank 0 of [2, 0], sum 2"]);
    assert!(lines(&said[3], "part:").is_empty());
    for (rank, said) in said.iter().enumerate() {
        let first = rank / 2 * 2;
        let pair = format!("[{first}, {}], sum 2", first + 1);
        assert_eq!(lines(said, "pair:"), [pair]);
        assert_eq!(lines(said, "alone:"), [format!("[{rank}], sum 1")]);
        let listed: &[&str] = if rank < 2 { &["[1, 0], sum 2"] } else { &[] };
        assert_eq!(lines(said, "listed:"), listed);
        assert_eq!(lines(said, "all:"), ["sum 4"]);
    }
}

#[test]
fn groups_are_split_off_one_another() {
    let (_job, said) = run("split", |_, _| {});
    check_split(&said);
    let ids = |rank: usize| -> Vec<String> {
        let states = lines(&said[rank], "communicator");
        let ids = states.iter().filter_map(|state| state.split_once(':'));
        ids.map(|(id, _)| id.to_owned()).collect()
    };
    // All of them, those of two members under one name on both.
    assert_eq!(ids(0).len(), 5, "{}", said[0]);
    assert_eq!(ids(3).len(), 3, "{}", said[3]);
    assert_eq!(ids(0)[1], ids(2)[1]);
    assert_ne!(ids(0)[1], ids(1)[1]);
}

#[test]
fn ranks_join_in_every_way_that_they_are_told_to() {
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
        let (_job, said) = run("split", |_, command| {
            command.envs(variables.iter().copied());
        });
        check_split(&said);
    }
}

/// The scenario's output, however the new group was made.
pub(crate) fn check_shrink(job: &mut Job) -> Vec<String> {
    let others = (0..RANKS).filter(|&rank| rank != CULPRIT);
    let said = others.map(|rank| {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
        let said = ended.stderr;
        assert!(said.contains("lost: all_reduce #4"), "{said}");
        let sums = lines(&said, "sum:");
        assert_eq!(sums[..3], ["4 of ranks [0, 1, 2, 3]"; 3], "{said}");
        assert_eq!(sums[3..], ["3 of ranks [0, 1, 3]"; 3], "{said}");
        said
    });
    let said = said.collect();
    assert!(!job.wait(CULPRIT).status.success());
    said
}

#[test]
fn what_is_left_of_a_communicator_goes_on() {
    for mode in ["clean_up_only", "none"] {
        let mut job = start("shrink", |_, command| {
            command
                .env("RCOMM_NCCL_ERROR_HANDLING", mode)
                // The end of the process is noticed at the time-out, and not by a connection.
                .env("RCOMM_SIM", "local_peers=1")
                .env("RCOMM_TIMEOUT_MS", "5000");
        });
        for said in check_shrink(&mut job) {
            // Made of the old one: the library was not asked for a new id.
            let states = lines(&said, "communicator");
            assert!(
                states.iter().any(|state| state.contains("\"3\"")),
                "{mode}: {said}"
            );
        }
    }
}

#[test]
fn what_is_left_connects_anew_after_an_error_of_the_connections() {
    // The library makes nothing of a communicator with such an error, revoked or not.
    let mut job = start("shrink", |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
    });
    check_shrink(&mut job);
}

#[test]
fn streams_wait_for_operations_and_operations_for_streams() {
    let (_job, said) = run("streams", |_, _| {});
    for said in said {
        let refused = lines(&said, "refused:");
        assert!(refused[0].contains("runs on no stream"), "{said}");
    }
}

#[test]
fn operations_are_captured_into_graphs() {
    let (job, said) = run("graph", |_, _| {});
    for (path, dump) in job.dumps() {
        // The first capture of the process, without what was refused in it; the one whose memory it keeps;
        // and the one that is not joined.
        let in_graph = |graph: Option<u64>| -> Vec<u64> {
            let entries = dump.entries.iter().filter(|it| it.graph_id == graph);
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
    for said in said {
        let refused = lines(&said, "refused:");
        assert!(
            refused[0].contains("is being captured into graph"),
            "{said}"
        );
        assert!(
            refused[1].contains("would fill new memory with zeros"),
            "{said}"
        );
        const UNJOINED: &str = "904";
        assert_eq!(lines(&said, "not joined:"), [UNJOINED]);
        let states = lines(&said, "communicator");
        // Those that were captured, by the numbers that the record has for them.
        assert!(states[0].contains("\"4 operations, #2 to #6\""), "{said}");
    }
}

#[test]
fn two_ranks_on_one_device_are_named_on_all_unless_that_is_allowed() {
    let on_one = |rank: u32, command: &mut Command| {
        let device = if rank == CULPRIT { 0 } else { rank };
        command
            .env("RCOMM_CUDA_DEVICE", device.to_string())
            // Each stays until all have reported their status.
            .env("RCOMM_STATUS_WAIT_MS", "20000");
    };
    for (rank, ended) in fail(start("train", on_one), 0..RANKS).1 {
        let error = ended.stderr;
        assert!(
            error.contains("rank 0 (cuda:0) and rank 2 (cuda:0) use the same device"),
            "rank {rank}: {error}"
        );
    }
    let (_job, said) = run("train", |rank, command| {
        on_one(rank, command);
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    });
    for said in said {
        assert_eq!(lines(&said, "sum:"), ["4"; 6], "{said}");
    }
}

#[test]
fn memory_is_registered_and_what_does_not_fit_is_refused_by_name() {
    let (_job, said) = run("memory", |_, _| {});
    for (rank, said) in said.iter().enumerate() {
        let next = (rank + 1) % 8;
        for sentence in [
            "refused what was undone: there is no registration",
            "it is host memory; on this rank the group works on",
            &format!("it is memory of cuda:{next}; on this rank the group works on cuda:{rank}"),
            "it is host memory, or no memory at all",
        ] {
            assert!(said.contains(sentence), "{sentence}: {said}");
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
        let mut asked = String::new();
        for question in [
            "CLIENT PROTOCOL 2",
            "TIMEOUT 5",
            "SET FORMAT json",
            "VERBOSE STATUS",
        ] {
            asked.clear();
            lines.read_line(&mut asked).unwrap();
            assert_eq!(asked.trim_end(), question);
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
