//! `rcomm-web` on sources that it reaches over the network, instead of this node's rings.

mod common;
#[path = "../../analyzer/tests/sources/server.rs"]
mod server;

use common::{Web, wait_until};
use rcomm::store::{Store as _, TcpStore};
use serde_json::Value;
use std::path::Path;

/// Serves the recorded answers of a rank's worker server: of four ranks over gloo, rank 2 never issues all_reduce #6.
/// Returns the URL.
fn worker_server(rank: u32) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = folder.join("../analyzer/tests/fixtures/worker_servers");
    let answer = |name: &str| std::fs::read(folder.join(name)).expect("fixtures are checked in");
    let ring = answer(&format!("fr_trace_rank{rank}.json"));
    let answers = [
        ("/handler/", (200, answer("handlers.json"))),
        ("/handler/fr_trace_json", (200, ring)),
        (
            "/handler/dump_nccl_trace_pickle",
            (200, answer("nccl_empty")),
        ),
    ];
    format!("http://{}", server::serve(answers.into()))
}

#[test]
fn the_culprit_of_a_pytorch_job_is_reported_and_exported_through_its_store_or_worker_servers() {
    let store = TcpStore::host("127.0.0.1", 0, common::DEADLINE).expect("a port is free");
    let servers: Vec<String> = (0..4).map(worker_server).collect();
    for (rank, address) in servers.iter().enumerate() {
        let key = format!("debug_server/rank{rank}");
        store
            .set(&key, address.as_bytes())
            .expect("the store answers");
    }
    let store = format!("127.0.0.1:{}", store.port());
    let named: Vec<String> = servers
        .iter()
        .map(|address| format!("--worker-server={address}"))
        .collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    for sources in [&["--store", &store][..], &["--torch-store", &store], &named] {
        let web = Web::start(sources);
        web.wait_until_ready();
        let report = wait_until("the verdict", || {
            let answer = web.get("/api/v1/report", &[&web.authorized()]);
            let report: Value = serde_json::from_str(&answer.body).ok()?;
            (report["verdict"] == "stuck").then_some(report)
        });
        let first = &report["findings"][0];
        assert_eq!(
            (&first["code"], &first["culprit_ranks"]),
            (&"E101".into(), &serde_json::json!([2]))
        );
        let metrics = web.get("/metrics", &[&web.authorized()]).body;
        let culprit = metrics
            .lines()
            .find(|line| line.starts_with("rcomm_culprit_rank{"));
        assert!(
            culprit.is_some_and(|line| line.contains("rank=\"2\"")),
            "{metrics}"
        );
    }
}

#[test]
fn a_store_without_ranks_is_named_with_what_was_looked_for() {
    let store = TcpStore::host("127.0.0.1", 0, common::DEADLINE).expect("a port is free");
    let web = Web::start(&["--store", &format!("127.0.0.1:{}", store.port())]);
    let problem = wait_until("the reason", || {
        let answer = web.get("/api/v1/status", &[&web.authorized()]);
        answer.body.contains("holds no").then_some(answer.body)
    });
    for looked_for in ["endpoint", "worker server"] {
        assert!(problem.contains(looked_for), "{problem}");
    }
}
