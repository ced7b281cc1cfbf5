//! `rcomm-fr analyze` on real dumps: the verdict, its forms and its exit codes.

use crate::program::{finish, fixture, rcomm_fr, run, run_with_reader_that_stops};
use rcomm_analyzer::Report;
use rcomm_analyzer::print::json;
use rcomm_recorder::publish::{LaunchRecord, LaunchedRank, RankEnd};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

/// The report on a scenario's pickles, read from its JSON.
fn report(scenario: &str) -> Report {
    let analyzed = run(&["analyze", "--format", "json", &fixture(scenario, "pickle")]);
    serde_json::from_str(&analyzed.stdout).unwrap()
}

#[test]
fn the_page_of_each_kind_of_fault_does_not_drift() {
    for scenario in [
        "never-join-w4",
        "nccl-stuck-2x2x2",
        "pg-deadlock-2x2",
        "crashed-w4",
        "size-mismatch-w4",
        "p2p-send-no-recv-w2",
        "straggler-w4",
        "truncated-dump-w4",
        "pg-cycle-2x2",
    ] {
        let analyzed = run(&["analyze", &fixture(scenario, "pickle")]);
        assert_eq!(analyzed.code, Some(1), "{scenario}: {}", analyzed.stderr);
        assert_eq!(analyzed.stderr, "", "{scenario}");
        let page = analyzed
            .stdout
            .replace(&fixture(scenario, "pickle"), "dumps");
        insta::assert_snapshot!(format!("page_of_{scenario}"), page);
    }
}

#[test]
fn healthy_job_is_exit_code_zero() {
    for scenario in [
        "healthy-w4",
        "batch-ring-w4",
        "coalesced-w4",
        "healthy-native-w2",
    ] {
        let analyzed = run(&["analyze", &fixture(scenario, "pickle")]);
        assert_eq!(analyzed.code, Some(0), "{scenario}: {}", analyzed.stdout);
        assert!(
            analyzed.stdout.starts_with("HEALTHY  "),
            "{}",
            analyzed.stdout
        );
    }
}

#[test]
fn a_path_alone_is_analyzed() {
    let dumps = fixture("never-join-w4", "pickle");
    let named = run(&["analyze", &dumps]);
    let alone = run(&[&dumps]);
    assert_eq!(alone.code, Some(1), "{}", alone.stderr);
    assert_eq!(alone.stdout, named.stdout);
    let neither = run(&["nothing-here"]);
    assert_eq!(neither.code, Some(2));
    assert!(
        neither
            .stderr
            .contains("unrecognized subcommand 'nothing-here'"),
        "{}",
        neither.stderr
    );
}

#[test]
fn pages_are_as_wide_as_columns_says() {
    let dumps = fixture("cascade-2x2x2", "pickle");
    let widest = |columns: &str| {
        let mut command = rcomm_fr(&["analyze", &dumps]);
        command.env("COLUMNS", columns);
        let page = finish(command).stdout;
        page.lines().map(|line| line.chars().count()).max().unwrap()
    };
    assert!((60..=80).contains(&widest("80")));
    assert!((81..=100).contains(&widest("100")));
    // A value that is no width is ignored.
    assert_eq!(widest("wide"), widest("80"));
}

#[test]
fn a_missing_path_among_others_becomes_a_note() {
    for (scenario, code) in [("healthy-w4", 0), ("never-join-w4", 1)] {
        let dumps = fixture(scenario, "pickle");
        let analyzed = run(&["analyze", "/nowhere/dumps", &dumps, "/nowhere/rank_*"]);
        assert_eq!(analyzed.code, Some(code), "{scenario}: {}", analyzed.stdout);
        for note in ["left aside: /nowhere/dumps", "left aside: /nowhere/rank_*"] {
            let noted = analyzed.stdout.matches(note).count();
            assert_eq!(noted, 1, "{scenario}: {}", analyzed.stdout);
        }
    }
}

/// A folder with the dumps of `never-join-w4`, changed by `change`; `None` leaves one out.
fn never_join(change: impl Fn(u32, Vec<u8>) -> Option<Vec<u8>>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..4 {
        let name = format!("rank_{rank}");
        let path = format!("{}/{name}", fixture("never-join-w4", "pickle"));
        if let Some(bytes) = change(rank, fs::read(path).unwrap()) {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
    }
    folder
}

/// Asserts that the verdict on a folder is inconclusive and that the report states this reason.
fn assert_inconclusive(folder: &tempfile::TempDir, reason: &str) {
    let path = folder.path().to_str().unwrap();
    let analyzed = run(&["analyze", path]);
    assert_eq!(analyzed.code, Some(2), "{}", analyzed.stdout);
    assert!(
        analyzed.stdout.starts_with("INCONCLUSIVE  "),
        "{}",
        analyzed.stdout
    );
    // The page wraps its lines.
    let page: Vec<&str> = analyzed.stdout.split_whitespace().collect();
    assert!(page.join(" ").contains(reason), "{}", analyzed.stdout);
}

#[test]
fn dumps_that_were_all_cut_are_inconclusive() {
    let folder = never_join(|_, mut bytes| {
        bytes.truncate(bytes.len() * 6 / 10);
        Some(bytes)
    });
    assert_inconclusive(
        &folder,
        "the records of ranks 0-3 could be read only in part",
    );
}

#[test]
fn one_readable_dump_among_garbage_is_inconclusive() {
    let folder = never_join(|rank, bytes| {
        Some(match rank {
            1 => bytes,
            _ => vec![b'#'; 2000],
        })
    });
    assert_inconclusive(&folder, "ranks 0, 2 and 3 left no readable record");
}

#[test]
fn the_dump_of_the_culprit_alone_is_inconclusive() {
    let folder = never_join(|rank, bytes| (rank == 1).then_some(bytes));
    assert_inconclusive(&folder, "ranks 0, 2 and 3 left no readable record");
}

#[test]
fn a_healthy_job_with_an_entry_left_out_is_inconclusive() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..4 {
        let name = format!("rank_{rank}.json");
        let text = fs::read(format!("{}/{name}", fixture("healthy-w4", "json"))).unwrap();
        let mut dump: Value = serde_json::from_slice(&text).unwrap();
        if rank == 2 {
            dump["entries"][3]["state"] = Value::from("no such state");
        }
        fs::write(folder.path().join(name), dump.to_string()).unwrap();
    }
    assert_inconclusive(&folder, "1 entry was skipped");
}

#[test]
fn a_rank_whose_entries_are_no_list_is_not_blamed() {
    for value in [Value::Null, Value::from(17)] {
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..4 {
            let name = format!("rank_{rank}.json");
            let text = fs::read(format!("{}/{name}", fixture("never-join-w4", "json"))).unwrap();
            let mut dump: Value = serde_json::from_slice(&text).unwrap();
            if rank == 2 {
                dump["entries"] = value.clone();
            }
            fs::write(folder.path().join(name), dump.to_string()).unwrap();
        }
        let path = folder.path().to_str().unwrap();
        let analyzed = run(&["analyze", "--format", "json", path]);
        let report: Report = serde_json::from_str(&analyzed.stdout).unwrap();
        assert_eq!(report.findings[0].culprit_ranks, [1], "{report:?}");
        let mut culprits = report
            .findings
            .iter()
            .flat_map(|finding| &finding.culprit_ranks);
        assert!(culprits.all(|&rank| rank != 2), "{report:?}");
        let is_reported = report
            .problems
            .iter()
            .any(|problem| problem.sentence.starts_with("`entries` is"));
        assert!(is_reported, "{:?}", report.problems);
    }
}

#[test]
fn foreign_and_replaced_files_beside_whole_dumps_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..4 {
        let name = format!("rank_{rank}");
        let bytes = fs::read(format!("{}/{name}", fixture("healthy-w4", "pickle"))).unwrap();
        fs::write(
            folder.path().join(format!("old_rank_{rank}")),
            &bytes[..bytes.len() / 2],
        )
        .unwrap();
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    fs::write(folder.path().join("notes.txt"), "no dump").unwrap();
    let analyzed = run(&["analyze", folder.path().to_str().unwrap()]);
    assert_eq!(analyzed.code, Some(0), "{}", analyzed.stdout);
}

#[test]
fn every_scenario_keeps_to_the_schema_in_json() {
    let schema: Value = serde_json::from_str(json::SCHEMA).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let fixtures = fixture("", "");
    let mut scenarios = 0;
    for scenario in fs::read_dir(fixtures).unwrap() {
        let scenario = scenario.unwrap();
        if !scenario.file_type().unwrap().is_dir() {
            continue;
        }
        let name = scenario.file_name().into_string().unwrap();
        // Not every recorder writes both forms.
        let forms = ["pickle", "json"].map(|form| fixture(&name, form));
        let folders: Vec<&String> = forms
            .iter()
            .filter(|form| Path::new(form).is_dir())
            .collect();
        assert!(!folders.is_empty(), "{name} has no dumps");
        for dumps in folders {
            let analyzed = run(&["analyze", "--format", "json", dumps]);
            let value: Value = serde_json::from_str(&analyzed.stdout).unwrap();
            let errors: Vec<String> = validator
                .iter_errors(&value)
                .map(|error| format!("{} at {}", error, error.instance_path()))
                .collect();
            assert!(errors.is_empty(), "{dumps}: {errors:#?}");
        }
        scenarios += 1;
    }
    assert!(scenarios >= 32, "only {scenarios} scenarios");
}

#[test]
fn pickle_and_json_of_one_moment_have_one_verdict() {
    for scenario in ["never-join-w4", "pg-deadlock-2x2", "size-mismatch-w4"] {
        let pickle = report(scenario);
        let text = run(&["analyze", "--format", "json", &fixture(scenario, "json")]).stdout;
        let json: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(pickle.verdict, json.verdict);
        assert_eq!(pickle.findings[0].code, json.findings[0].code);
        assert_eq!(
            pickle.findings[0].culprit_ranks,
            json.findings[0].culprit_ranks
        );
        assert_eq!(pickle.findings[0].seq, json.findings[0].seq);
    }
}

#[test]
fn path_that_names_nothing_is_one_clear_line_and_exit_code_two() {
    let analyzed = run(&["analyze", "/nowhere/dumps"]);
    assert_eq!(analyzed.code, Some(2));
    assert_eq!(analyzed.stdout, "");
    assert_eq!(
        analyzed.stderr,
        "error: /nowhere/dumps: No such file or directory (os error 2)\n"
    );
}

#[test]
fn folder_without_a_record_is_inconclusive() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("train.log"), "step 1\n").unwrap();
    let analyzed = run(&["analyze", dir.path().to_str().unwrap()]);
    assert_eq!(analyzed.code, Some(2));
    assert!(
        analyzed.stdout.starts_with("INCONCLUSIVE  "),
        "{}",
        analyzed.stdout
    );
    assert!(analyzed.stdout.contains("train.log"), "{}", analyzed.stdout);
}

#[test]
fn for_an_empty_folder_it_is_explained_how_to_get_records() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let analyzed = run(&["analyze", path]);
    assert_eq!(analyzed.code, Some(2));
    for part in [
        "PyTorch writes dumps when an operation of NCCL times out",
        "/tmp/nccl_trace_rank_<rank>",
    ] {
        assert!(
            analyzed.stderr.contains(part),
            "{part} in\n{}",
            analyzed.stderr
        );
    }
    // Other jobs may run on this machine: then they are listed.
    let alternatives = ["A job that hangs now:", "here:\n  --job "];
    assert!(
        alternatives
            .iter()
            .any(|part| analyzed.stderr.contains(part)),
        "{}",
        analyzed.stderr
    );
    // A program that reads the report gets no advice.
    let json = run(&["analyze", "--format", "json", path]);
    assert_eq!((json.code, json.stderr.as_str()), (Some(2), ""));
}

#[test]
#[cfg(not(feature = "tables"))]
fn query_says_that_this_build_lacks_it() {
    let asked = run(&["query", "select * from entries", "--format", "json", "/tmp"]);
    assert_eq!(asked.code, Some(2));
    assert!(
        asked.stderr.contains("built without `query`")
            && asked.stderr.contains("--features tables"),
        "{}",
        asked.stderr
    );
    assert!(!run(&["--help"]).stdout.contains("query"));
}

/// PyTorch's records state no time, so the times of their files are used.
#[test]
fn files_that_were_written_while_nothing_was_overdue_do_not_show_a_hang() {
    // When the newest operation of all files, which waits for rank 1, was issued.
    const ISSUED_NS: u64 = 1_795_239_695_873_462_017;
    let dir = never_join(|_, bytes| Some(bytes));
    let path = dir.path().to_str().unwrap();
    let set_written = |after: Duration| {
        for entry in fs::read_dir(dir.path()).unwrap() {
            let file = fs::File::options().write(true).open(entry.unwrap().path());
            let time = UNIX_EPOCH + Duration::from_nanos(ISSUED_NS) + after;
            file.unwrap().set_modified(time).unwrap();
        }
    };
    set_written(Duration::from_millis(300));
    let young = run(&["analyze", path]);
    assert_eq!(young.code, Some(2), "{}", young.stdout);
    for part in ["INCONCLUSIVE  ", "N304", "300 ms when the files were"] {
        assert!(young.stdout.contains(part), "{part} in\n{}", young.stdout);
    }
    let json = run(&["analyze", "--format", "json", path]);
    let young: Report = serde_json::from_str(&json.stdout).unwrap();
    assert!(young.findings.is_empty(), "{:?}", young.findings);
    set_written(Duration::from_secs(60));
    let old = run(&["analyze", path]);
    assert_eq!(old.code, Some(1), "{}", old.stdout);
    assert!(old.stdout.starts_with("STUCK  rank 1 "), "{}", old.stdout);
    assert!(
        old.stdout.contains("60 s before the files were written"),
        "{}",
        old.stdout
    );
    // A time days later is that of a copy, so no age is known.
    set_written(Duration::from_secs(3 * 86_400));
    let json = run(&["analyze", "--format", "json", path]);
    let copied: Report = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(copied.findings[0].culprit_ranks, [1]);
    let ages: Vec<Option<f64>> = copied
        .in_flight
        .iter()
        .map(|operation| operation.age_ms)
        .collect();
    assert_eq!(ages, [None]);
}

#[test]
fn report_goes_to_a_file_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    let dumps = fixture("never-join-w4", "pickle");
    let analyzed = run(&[
        "analyze",
        &dumps,
        "--format",
        "json",
        "-o",
        file.to_str().unwrap(),
    ]);
    assert_eq!(analyzed.code, Some(1));
    assert_eq!(analyzed.stdout, "");
    let report: Report = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(report.findings[0].culprit_ranks, vec![1]);
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        1,
        "the folder holds another file as well"
    );

    let failed = run(&["analyze", &dumps, "-o", "/nowhere/report.txt"]);
    assert_eq!(failed.code, Some(2));
    assert!(
        failed
            .stderr
            .starts_with("error: cannot write /nowhere/report.txt")
    );
}

#[test]
fn records_come_from_standard_input_and_from_an_archive() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("job.rcap");
    let dumps = fixture("never-join-w4", "pickle");
    let collected = run(&["collect", "-o", archive.to_str().unwrap(), &dumps]);
    assert_eq!(collected.code, Some(0), "{}", collected.stderr);
    let of_archive = run(&["analyze", archive.to_str().unwrap()]);
    let mut piped = rcomm_fr(&["analyze", "-"]);
    piped.stdin(Stdio::from(fs::File::open(&archive).unwrap()));
    for analyzed in [of_archive, finish(piped)] {
        assert_eq!(analyzed.code, Some(1), "{}", analyzed.stderr);
        assert!(
            analyzed.stdout.starts_with("STUCK  rank 1 never issued"),
            "{}",
            analyzed.stdout
        );
        // The manifest is not reported as a file that is no dump.
        assert!(!analyzed.stdout.contains("manifest"), "{}", analyzed.stdout);
    }
}

#[test]
fn html_and_perfetto_are_made_from_the_records() {
    let dumps = fixture("never-join-w4", "pickle");
    let html = run(&["analyze", &dumps, "--format", "html"]);
    assert_eq!(html.code, Some(1));
    for section in ["<h2>Collectives by rank", "<h2>Timeline", "<h2>Who waits"] {
        assert!(html.stdout.contains(section), "{section} is missing");
    }
    let trace = run(&["analyze", &dumps, "--format", "perfetto"]);
    assert_eq!(trace.code, Some(1));
    let trace: Value = serde_json::from_str(&trace.stdout).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().iter();
    assert_eq!(events.filter(|event| event["ph"] == "X").count(), 39);
}

#[test]
fn columns_hold_every_operation_and_all_columns_of_a_table_are_as_long() {
    let dumps = fixture("never-join-w4", "pickle");
    let printed = run(&["analyze", &dumps, "--format", "columns"]);
    assert_eq!(printed.code, Some(1));
    let document: Value = serde_json::from_str(&printed.stdout).unwrap();
    assert_eq!(document["schema"], "rcomm.columns/1");
    // The name and the number of rows of each table.
    let mut tables = Vec::new();
    for table in document["tables"].as_array().unwrap() {
        let columns = table["columns"].as_array().unwrap();
        let lengths: Vec<usize> = columns
            .iter()
            .map(|column| {
                let values = column["values"].as_object().unwrap();
                assert_eq!(values.len(), 1, "{column}");
                values.values().next().unwrap().as_array().unwrap().len()
            })
            .collect();
        let are_equal = lengths.iter().all(|length| *length == lengths[0]);
        assert!(are_equal, "{lengths:?}");
        tables.push((table["name"].as_str().unwrap(), lengths[0]));
    }
    let names: Vec<&str> = tables.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["entries", "collectives", "groups", "findings"]);
    assert!(tables[0].1 >= 39 && tables[1].1 > 0, "{tables:?}");
    let ranks = &document["tables"][0]["columns"][0]["values"]["int64"];
    let ranks: std::collections::BTreeSet<i64> = ranks
        .as_array()
        .unwrap()
        .iter()
        .map(|rank| rank.as_i64().unwrap())
        .collect();
    assert_eq!(ranks.len(), 4);
}

#[test]
fn records_of_a_running_job_accuse_no_rank() {
    let dumps = fixture("never-join-w4", "pickle");
    let analyzed = run(&["analyze", &dumps, "--snapshot", "--overdue", "1h"]);
    assert_eq!(analyzed.code, Some(0), "{}", analyzed.stdout);
    assert!(
        analyzed.stdout.starts_with("RUNNING  "),
        "{}",
        analyzed.stdout
    );
}

#[test]
fn world_size_from_the_user_makes_absent_ranks_known() {
    let dumps = fixture("healthy-w4", "pickle");
    let analyzed = run(&["analyze", &dumps, "--world-size", "6"]);
    assert!(
        analyzed.stdout.contains("read 4 of 6 ranks"),
        "{}",
        analyzed.stdout
    );
}

#[test]
fn a_reached_memory_limit_is_one_clear_line_and_exit_code_two() {
    let dumps = fixture("nccl-slow-2x4", "pickle");
    let analyzed = run(&["analyze", &dumps, "--memory-limit", "1MiB"]);
    assert_eq!(analyzed.code, Some(2));
    let reason = "error: the records need more than 1 MiB of memory";
    assert!(analyzed.stderr.starts_with(reason), "{}", analyzed.stderr);
    let enough = run(&["analyze", &dumps, "--memory-limit", "4GiB"]);
    assert_eq!(enough.code, Some(1), "{}", enough.stderr);
    for (limit, why) in [
        ("4parsecs", "is not a unit"),
        ("99999999999999999999", "it is too large"),
    ] {
        let wrong = run(&["analyze", &dumps, "--memory-limit", limit]);
        assert_eq!(wrong.code, Some(2));
        assert!(wrong.stderr.contains(why), "{}", wrong.stderr);
    }
}

#[test]
fn reader_that_stops_early_does_not_change_the_exit_code() {
    let dumps = fixture("never-join-w4", "pickle");
    assert_eq!(
        run_with_reader_that_stops(&["analyze", &dumps, "--verbose"]),
        Some(1)
    );
}

/// Writes the launch record of a job of three ranks that is over. Ranks that failed ended a second before the others.
fn write_launch(folder: &Path, exit_codes: [i32; 3]) {
    const SECOND_NS: i64 = 1_000_000_000;
    let ranks = exit_codes
        .iter()
        .zip(0..)
        .map(|(&code, rank)| LaunchedRank {
            rank,
            pid: 1000 + rank,
            end: Some(RankEnd {
                time_ns: (10 + i64::from(code == 0)) * SECOND_NS,
                exit_code: Some(code),
                signal: None,
                out_of_memory: None,
            }),
            ..LaunchedRank::default()
        });
    let launch = LaunchRecord {
        schema: LaunchRecord::SCHEMA.into(),
        job: "job".into(),
        attempt: 0,
        host: "n1".into(),
        node: 0,
        world_size: 3,
        launcher_pid: 999,
        started_ns: SECOND_NS,
        ended_ns: 11 * SECOND_NS,
        received: vec![],
        ranks: ranks.collect(),
    };
    launch.write(folder).unwrap();
}

#[test]
fn a_job_with_only_a_launch_record_is_judged_by_it() {
    for (exit_codes, code, beginning) in [
        ([0, 0, 0], 0, "ENDED  all 3 ranks ended in order"),
        (
            [0, 3, 0],
            1,
            "CRASHED  the job was over at 00:00:11 UTC: the process of rank 1 ended first;\n         rank 1 exited with code 3\n",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_launch(folder.path(), exit_codes);
        let job = folder.path().join("job");
        let analyzed = run(&["analyze", job.to_str().unwrap()]);
        let is_expected = analyzed.stdout.starts_with(beginning);
        assert!(is_expected, "{}", analyzed.stdout);
        assert_eq!(analyzed.code, Some(code), "{}", analyzed.stdout);
    }
}
