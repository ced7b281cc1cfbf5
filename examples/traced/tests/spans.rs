//! A collector receives the collectives of a program as children of the program's own spans.
#![allow(clippy::unwrap_used)]

#[path = "../../../web/tests/common/otlp.rs"]
mod otlp;

use otlp::{Collector, attributes, items, python};
use rcomm_tests::process::Job;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

const RANKS: u32 = 2;

/// The name of a span, preceded by the names of its ancestors.
fn path(spans: &HashMap<&str, &Value>, span: &Value) -> String {
    let mut names = vec![span["name"].as_str().unwrap()];
    let mut ancestor = span;
    while let Some(parent) = ancestor["parentSpanId"].as_str() {
        ancestor = spans[parent];
        assert_eq!(ancestor["traceId"], span["traceId"]);
        names.push(ancestor["name"].as_str().unwrap());
    }
    names.reverse();
    names.join(" > ")
}

#[test]
fn collectives_are_children_of_the_spans_that_issue_them() {
    let Some(python) = python() else { return };
    let collector = Collector::start();
    let endpoint = format!("http://{}", collector.address);
    let mut job = Job::start_as(
        env!("CARGO_BIN_EXE_traced"),
        RANKS,
        "traced",
        |_, command| {
            command
                .env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)
                .env("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a secret")
                .env("RCOMM_TIMEOUT_MS", "30000");
        },
    );
    for rank in 0..RANKS {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "rank {rank}: {ended:?}");
    }
    let decoded = collector.decoded(&python);
    let received: Vec<&Value> = items(&decoded["traces"], ["resourceSpans", "scopeSpans", "spans"])
        .map(|(resource, span)| {
            assert_eq!(attributes(resource)["service.name"], "trainer");
            span
        })
        .collect();
    let spans: HashMap<&str, &Value> = received
        .iter()
        .map(|span| (span["spanId"].as_str().unwrap(), *span))
        .collect();
    assert_eq!(spans.len(), received.len(), "two spans have one id");

    let mut paths: BTreeMap<String, usize> = BTreeMap::new();
    let mut links: HashMap<&str, Vec<u64>> = HashMap::new();
    for span in &received {
        *paths.entry(path(&spans, span)).or_default() += 1;
        let ns = |key: &str| -> u64 { span[key].as_str().unwrap().parse().unwrap() };
        let (start, end) = (ns("startTimeUnixNano"), ns("endTimeUnixNano"));
        assert!(start < end, "{span}");
        let span_attributes = attributes(span);
        let Some(rank) = span_attributes.get("rcomm.rank") else {
            continue;
        };
        let parent = spans[span["parentSpanId"].as_str().unwrap()];
        let parent_start: u64 = parent["startTimeUnixNano"]
            .as_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!(parent_start <= start, "{span} in {parent}");
        assert_eq!(span_attributes["rcomm.state"], "completed");
        let link = span["links"][0]["traceId"].as_str().unwrap();
        links
            .entry(link)
            .or_default()
            .push(rank.as_str().unwrap().parse().unwrap());
    }
    let per_rank = |paths: &BTreeMap<String, usize>, path: &str| {
        paths.get(path).copied().unwrap_or_default() / RANKS as usize
    };
    assert_eq!(per_rank(&paths, "train_step"), 3, "{paths:?}");
    assert_eq!(per_rank(&paths, "train_step > backward"), 3);
    let reduced = "train_step > backward > all_reduce default_pg";
    assert_eq!(per_rank(&paths, reduced), 6, "{paths:?}");
    assert_eq!(per_rank(&paths, "train_step > barrier default_pg"), 3);
    assert_eq!(paths.len(), 4, "a span is at another place: {paths:?}");
    // The spans of both ranks for one operation link to the same trace, whose id each rank derives by itself.
    assert_eq!(links.len(), 9, "{links:?}");
    for ranks in links.values_mut() {
        ranks.sort_unstable();
        assert_eq!(*ranks, [0, 1]);
    }
}
