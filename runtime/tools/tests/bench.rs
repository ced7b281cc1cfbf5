//! Runs `rcomm-bench` as a user does: with ranks as processes, checked results, and columns that can be parsed.

use serde_json::Value;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rcomm-bench"))
        .args(args)
        .args(["--time", "5ms", "--bind", "none"])
        .output()
        .expect("the program of this package starts")
}

fn rows(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}: {text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let json: Value = serde_json::from_str(&text).expect("one JSON object");
    json["rows"].as_array().expect("a list of rows").clone()
}

#[test]
fn every_operation_is_right_at_odd_sizes() {
    let operations = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter,barrier,send_recv";
    let rows = rows(&bench(&[
        operations, "-n", "3", "-b", "4", "-e", "40K", "-f", "97", "--check", "--format", "json",
    ]));
    // Three rows for each operation, one a size; one row for the barrier, which has no size.
    assert_eq!(rows.len(), 9 * 3 + 1);
    for row in rows {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(row["p50_us"].as_f64().expect("a time") > 0.0, "{row}");
        assert!(row["p99_us"].as_f64() >= row["p50_us"].as_f64(), "{row}");
    }
}

#[test]
fn a_product_over_more_ranks_than_a_byte_has_bits_is_right() {
    let rows = rows(&bench(&[
        "reduce", "-n", "18", "-o", "product", "-b", "256", "-e", "256", "--check", "--format",
        "json",
    ]));
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["errors"], 0, "{:?}", rows[0]);
}

#[test]
fn bus_bandwidth_is_that_of_nccl_tests() {
    let rows = rows(&bench(&[
        "all_reduce",
        "-n",
        "4",
        "-b",
        "64K",
        "-e",
        "64K",
        "--format",
        "json",
    ]));
    let (alg, bus) = (rows[0]["algbw_gbs"].as_f64(), rows[0]["busbw_gbs"].as_f64());
    let ratio = bus.expect("a number") / alg.expect("a number");
    assert!(
        (ratio - 1.5).abs() < 1e-9,
        "2 (n - 1) / n of 4 ranks, not {ratio}"
    );
}

#[test]
fn a_table_ends_with_the_average_bandwidth_as_in_nccl_tests() {
    let output = bench(&[
        "all_reduce",
        "-g",
        "2",
        "-w",
        "1",
        "-b",
        "64K",
        "-e",
        "128K",
    ]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let last = text.lines().last().unwrap_or_default();
    let average = last.strip_prefix("# Avg bus bandwidth    : ");
    let average: f64 = average.unwrap_or_default().parse().expect(&text);
    let column = |line: &str| line.split_whitespace().rev().nth(1)?.parse::<f64>().ok();
    let rows = text.lines().filter(|line| line.starts_with("all_reduce"));
    let busbw: Vec<f64> = rows.filter_map(column).collect();
    assert_eq!(busbw.len(), 2, "{text}");
    // The column is rounded to two places.
    let mean = (busbw[0] + busbw[1]) / 2.0;
    assert!(
        (average - mean).abs() < 0.0051,
        "{average}, not {mean}: {text}"
    );
}

#[test]
fn asynchronous_calls_report_the_time_of_the_call() {
    let rows = rows(&bench(&[
        "all_reduce",
        "-n",
        "2",
        "-b",
        "8",
        "-e",
        "8",
        "--calls",
        "async",
        "--format",
        "json",
    ]));
    assert!(rows[0]["issue_us"].as_f64().expect("a time") > 0.0);
}

#[test]
fn overlapped_computation_reports_the_hidden_share() {
    let rows = rows(&bench(&[
        "all_reduce",
        "-n",
        "2",
        "-b",
        "64K",
        "-e",
        "64K",
        "--iterations",
        "20",
        "--calls",
        "overlap",
        "--format",
        "json",
    ]));
    let hidden = rows[0]["overlap"].as_f64().expect("a share");
    assert!((0.0..=1.0).contains(&hidden), "{hidden}");
}

#[test]
fn a_root_that_does_not_exist_is_refused_with_the_facts() {
    let output = bench(&["broadcast", "-n", "2", "--root", "7"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("root 7 is not one of 2 ranks"), "{text}");
}

#[test]
fn a_usage_error_is_printed_once_and_names_the_wrong_arguments() {
    let stderr_of = |args: &[&str]| {
        let output = bench(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        String::from_utf8(output.stderr).expect("valid UTF-8")
    };
    assert_eq!(
        stderr_of(&["all_reduce,barrier", "-n", "2", "--calls", "async"]),
        "rcomm-bench: --calls async and --calls overlap measure all_reduce only: leave out barrier\n"
    );
    assert_eq!(
        stderr_of(&["all_reduce", "-n", "2", "-b", "2K", "-e", "1K"]),
        "rcomm-bench: --min-bytes 2048 is larger than --max-bytes 1024\n"
    );
    let without_ranks = stderr_of(&["all_reduce"]);
    assert!(
        without_ranks.starts_with(
            "rcomm-bench: -n is not given, and the variables of a launcher are missing or wrong"
        ),
        "{without_ranks}"
    );
}

#[test]
fn the_table_in_use_is_printed_with_the_lines_of_the_environment_first() {
    let output = Command::new(env!("CARGO_BIN_EXE_rcomm-bench"))
        .args(["tune", "--print"])
        .env("RCOMM_TUNING", "all_reduce sockets 2 3M notice; streams 4")
        .output()
        .expect("the program of this package starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let first: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(first, ["all_reduce", "sockets", "2", "3M", "notice"]);
    assert_eq!(lines.last().map(|line| line.ends_with('4')), Some(true));
}

#[test]
fn measuring_a_machine_gives_a_usable_table() {
    let folder = std::env::temp_dir().join(format!("rcomm-tune-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary directory");
    let file = folder.join("table");
    let output = Command::new(env!("CARGO_BIN_EXE_rcomm-bench"))
        .args([
            "tune",
            "-n",
            "3",
            "-b",
            "1K",
            "-e",
            "4K",
            "--topologies",
            "hosts",
        ])
        .args(["--time", "1ms", "--rounds", "1", "--output"])
        .arg(&file)
        .output()
        .expect("the program of this package starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    let printed = Command::new(env!("CARGO_BIN_EXE_rcomm-bench"))
        .args(["tune", "--print"])
        .env("RCOMM_TUNING_FILE", &file)
        .output()
        .expect("the program of this package starts");
    std::fs::remove_dir_all(&folder).expect("the directory is removed");
    assert!(printed.status.success());
    let text = String::from_utf8_lossy(&printed.stdout);
    for pattern in [
        "all_reduce",
        "broadcast",
        "all_gather",
        "reduce",
        "reduce_scatter",
    ] {
        let is_for_three_hosts = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields.first() == Some(&pattern) && fields[1..3] == ["hosts", "3"]
        };
        assert!(text.lines().any(is_for_three_hosts), "{pattern}: {text}");
    }
}
