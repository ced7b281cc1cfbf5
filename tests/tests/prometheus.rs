//! A real Prometheus scrapes a real job of four ranks, with the files that users get.
//!
//! Rank 2 stops joining. Then every query of the dashboards' panels has a result, except those on the cost of late
//! ranks, and the alerts name the rank. While the test records steps of two ranks' reducers, every query of the
//! dashboard on training has a result.
//! The tests need `prometheus` and `promtool`; without them, they print that they are skipped.
#![allow(clippy::unwrap_used)]

use rcomm_recorder::model::{ProcessGroupInfo, ReducerBucket, ReducerSums, ReducerTimes};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use rcomm_tests::fault::Fault;
use rcomm_tests::process::{CULPRIT, Job, free_port, wait_until};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The folder of the files that users get.
fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../web/deploy")
}

/// Whether both programs are installed; prints a line if not.
fn has_prometheus() -> bool {
    let found = ["prometheus", "promtool"].iter().all(|program| {
        let mut command = Command::new(program);
        let output = command.arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    });
    if !found {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: prometheus and promtool are not installed"
        );
    }
    found
}

/// Runs promtool on the shipped files, and asserts that it succeeds.
fn promtool(args: &[&str]) {
    let mut command = Command::new("promtool");
    let output = command
        .args(args)
        .current_dir(deploy().join("prometheus"))
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "promtool {args:?}: {text}");
}

/// A Prometheus server, which ends when it is dropped.
struct Prometheus {
    child: Child,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// Starts Prometheus with the configuration and the rules that are shipped; only the address, the path of the token
    /// and the interval are changed.
    fn start(target: SocketAddr, token: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let token_file = folder.path().join("token");
        std::fs::write(&token_file, token).unwrap();
        let source = deploy().join("prometheus");
        let config = std::fs::read_to_string(source.join("prometheus.yml")).unwrap();
        let config = config
            .replace("127.0.0.1:8765", &target.to_string())
            .replace("/etc/rcomm/token", token_file.to_str().unwrap())
            .replace("15s", "500ms");
        std::fs::write(folder.path().join("prometheus.yml"), config).unwrap();
        let rules = source.join("rcomm-alerts.yml");
        std::fs::copy(rules, folder.path().join("rcomm-alerts.yml")).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let child = Command::new("prometheus")
            .arg("--config.file=prometheus.yml")
            .arg("--storage.tsdb.path=data")
            .arg("--enable-feature=exemplar-storage")
            .arg(format!("--web.listen-address={address}"))
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let prometheus = Self {
            child,
            address,
            _folder: folder,
        };
        wait_until("Prometheus to be ready", || {
            let (status, _) = get(address, "/-/ready")?;
            (status == 200).then_some(())
        });
        prometheus
    }

    /// The data of the answer of the HTTP API to a GET request; panics if its status is not 200.
    fn api(&self, path: &str) -> Value {
        let (status, body) = get(self.address, path).unwrap();
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(status, 200, "{path}: {answer}");
        answer["data"].clone()
    }

    /// The series of an instant query's result.
    fn query(&self, expr: &str) -> Vec<Value> {
        let data = self.api(&format!("/api/v1/query?query={}", encoded(expr)));
        data["result"].as_array().cloned().unwrap()
    }
}

/// The status and the body of an answer; `None` if there is none.
fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, body.to_owned()))
}

/// The text in percent-encoding.
fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

fn dashboard(name: &str) -> Value {
    let path = deploy().join(format!("grafana/dashboards/{name}.json"));
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

/// Whether the result of a query has a number.
fn has_numbers(result: &[Value]) -> bool {
    result.iter().any(|series| series["value"][1] != "NaN")
}

/// Every panel's title and queries; their variables are filled in as Grafana does for "All".
fn panels(dashboard: &Value) -> Vec<(String, Vec<String>)> {
    let mut panels = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel}");
        let targets = panel["targets"].as_array().unwrap().iter();
        let exprs = targets.map(|target| {
            let expr = target["expr"].as_str().unwrap();
            let filled = expr
                .replace("$__rate_interval", "1m")
                .replace("$instance", ".*")
                .replace("$group", ".*")
                .replace("$desc", ".*");
            assert!(!filled.contains('$'), "{filled}");
            filled
        });
        panels.push((panel["title"].as_str().unwrap().to_owned(), exprs.collect()));
    }
    panels
}

#[test]
fn the_shipped_configuration_and_alerts_pass_promtools_checks() {
    if !has_prometheus() {
        return;
    }
    promtool(&["check", "config", "--syntax-only", "prometheus.yml"]);
    promtool(&["check", "rules", "rcomm-alerts.yml"]);
    promtool(&["test", "rules", "rcomm-alerts.test.yml"]);
}

/// The metrics of the panels on the cost of late ranks, which have no values for a job that is stuck.
const LATE_RANK_METRICS: [&str; 2] = [
    "rcomm_rank_straggler_time_ratio",
    "rcomm_rank_arrival_lag_p50_seconds",
];

#[test]
fn panels_have_values_and_alerts_name_the_rank_for_a_job_that_hangs() {
    if !has_prometheus() {
        return;
    }
    let rings = tempfile::tempdir().unwrap();
    let page = rcomm_web::serve(rcomm_web::Options {
        ring_dir: Some(rings.path().to_owned()),
        ..rcomm_web::Options::default()
    })
    .unwrap();
    let prometheus = Prometheus::start(page.address(), page.token());
    // The job works for ten seconds and starts after Prometheus, because a rate needs samples that grow.
    let _job = Job::start(
        env!("CARGO_BIN_EXE_rank"),
        4,
        Fault::StopJoining,
        |_, command| {
            command
                .args(["200", "50"])
                .env("RCOMM_TIMEOUT_MS", "120000")
                .env("RCOMM_RING_DIR", rings.path());
        },
    );
    let stuck = "rcomm_verdict_info{verdict=\"stuck\"} == 1";
    wait_until("the verdict", || prometheus.query(stuck).pop());
    let transcript = &mut std::io::stderr().lock();

    // The expected counts: 200 steps with two all_reduces on four ranks, and one all_reduce of the next step on the two
    // ranks whose group has no rank at fault.
    for (expr, value) in [
        ("sum(rcomm_collectives_total{op=\"all_reduce\"})", "1602"),
        ("sum(rcomm_collectives_failed_total) or vector(0)", "0"),
        (
            "sum(rcomm_collective_duration_seconds_count{desc=\"dp\"})",
            "400",
        ),
        ("min(rcomm_last_completed_seq{desc=\"tp\"})", "200"),
        ("rcomm_ranks_read", "4"),
        ("sum(rcomm_recorder_unread_total)", "0"),
    ] {
        let result = prometheus.query(expr);
        writeln!(transcript, "{expr}  =>  {}", result[0]["value"][1]).unwrap();
        assert_eq!(result[0]["value"][1], value, "{expr}: {result:?}");
    }

    for name in [
        "job-overview",
        "group-drill-down",
        "stragglers",
        "recorder-health",
        "pytorch-job",
    ] {
        let dashboard = dashboard(name);
        writeln!(transcript, "\n{}", dashboard["title"]).unwrap();
        for (title, exprs) in panels(&dashboard) {
            for expr in exprs {
                let result = prometheus.query(&expr);
                writeln!(transcript, "  {title}: {} series  {expr}", result.len()).unwrap();
                let has_data = has_numbers(&result);
                let is_on_late_ranks = LATE_RANK_METRICS.iter().any(|metric| expr.contains(metric));
                assert!(
                    has_data != is_on_late_ranks,
                    "{name}, {title}: {expr}: has data: {has_data}"
                );
            }
        }
    }

    let rules = wait_until("the alerts to be evaluated", || {
        let rules = prometheus.api("/api/v1/rules?type=alert");
        let rules = rules["groups"][0]["rules"].as_array().cloned()?;
        let is_active = |rule: &Value| {
            let alerts = rule["alerts"].as_array();
            alerts.is_some_and(|alerts| !alerts.is_empty())
        };
        assert!(
            rules.iter().all(|rule| rule["health"] != "err"),
            "{rules:?}"
        );
        (rules.iter().filter(|rule| is_active(rule)).count() >= 2).then_some(rules)
    });
    writeln!(transcript, "\nalerts").unwrap();
    let mut active = Vec::new();
    for rule in &rules {
        let alerts = rule["alerts"].as_array().unwrap();
        writeln!(transcript, "  {}: {}", rule["name"], alerts.len()).unwrap();
        for alert in alerts {
            active.push((rule["name"].clone(), alert["labels"]["rank"].clone()));
        }
    }
    let rank = Value::from(CULPRIT.to_string());
    assert!(
        active.contains(&("RcommJobStuck".into(), Value::Null)),
        "{active:?}"
    );
    assert!(
        active.contains(&("RcommRankAtFault".into(), rank)),
        "{active:?}"
    );
}

/// Records a step of a rank's reducer with 10 ms forward, 20 ms backward, and 15 ms of communication, of which 5 ms are
/// exposed.
fn train(ring: &FlightRecorder, step: u64) {
    const MS: u64 = 1_000_000;
    let times = ReducerTimes {
        step,
        forward_ns: 10 * MS,
        backward_ns: 20 * MS,
        communication_ns: 15 * MS,
        exposed_ns: 5 * MS,
        bytes: 1 << 20,
        bucket_count: 1,
        sums: ReducerSums {
            steps: step,
            forward_ns: step * 10 * MS,
            backward_ns: step * 20 * MS,
            communication_ns: step * 15 * MS,
            exposed_ns: step * 5 * MS,
        },
    };
    ring.note_reducer_step(0, &times, [ReducerBucket::default()].into_iter());
}

#[test]
fn every_panel_on_training_has_an_answer_for_ranks_with_a_reducer() {
    if !has_prometheus() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let rings = [0, 1].map(|rank| {
        let mut config = RecorderConfig::new("training", rank, 2);
        config.placement = Placement::Dir(folder.path().to_owned());
        let ring = FlightRecorder::create(&config).unwrap();
        let info = ProcessGroupInfo {
            id: 0,
            name: "0".into(),
            desc: "dp".into(),
            ranks: [0, 1].into(),
        };
        ring.add_group(&info, Duration::from_secs(60));
        ring
    });
    let page = rcomm_web::serve(rcomm_web::Options {
        ring_dir: Some(folder.path().to_owned()),
        ..rcomm_web::Options::default()
    })
    .unwrap();
    let prometheus = Prometheus::start(page.address(), page.token());
    let panels = panels(&dashboard("training"));
    assert!(panels.len() >= 9, "{panels:?}");
    let exprs = || panels.iter().flat_map(|(_, exprs)| exprs);
    let mut step = 0;
    // A rate needs samples that grow.
    wait_until("every panel to have an answer", || {
        step += 1;
        rings.iter().for_each(|ring| train(ring, step));
        exprs()
            .all(|expr| has_numbers(&prometheus.query(expr)))
            .then_some(())
    });
    let transcript = &mut std::io::stderr().lock();
    writeln!(transcript, "\n{}", dashboard("training")["title"]).unwrap();
    for (title, exprs) in &panels {
        for expr in exprs {
            let result = prometheus.query(expr);
            writeln!(transcript, "  {title}: {} series  {expr}", result.len()).unwrap();
        }
    }
    // These values follow from the times of a step, whatever the rate of steps.
    for (title, expected) in [
        ("Longest step", 0.035),
        ("Exposed communication", 0.005),
        ("Exposed share of the steps", 5.0 / 35.0),
        (
            "Communication that the backward pass hides, by kind of group",
            2.0 / 3.0,
        ),
        ("Communication in a step, by kind of group", 0.015),
    ] {
        let (_, exprs) = panels.iter().find(|panel| panel.0 == title).unwrap();
        let result = prometheus.query(&exprs[0]);
        let value: f64 = result[0]["value"][1].as_str().unwrap().parse().unwrap();
        assert!((value - expected).abs() < 1e-6, "{title}: {value}");
    }
    let mean = panels.iter().find(|panel| panel.0 == "Mean step, by part");
    let parts = prometheus.query(&mean.unwrap().1[0]);
    assert_eq!(parts.len(), 3, "{parts:?}");
}
