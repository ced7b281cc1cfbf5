use super::*;
use std::io::Cursor;

/// A record as in the documentation of Inspector, in one line.
fn record(rank: u32, number: u64, us: f64) -> String {
    format!(
        r#"{{"header": {{"id": "0x7f8c496ae9f661", "rank": {rank}, "n_ranks": 2, "nnodes": 1}}, "metadata": {{"inspector_output_format_version": "v4.0", "git_rev": "", "rec_mechanism": "profiler_plugin", "dump_timestamp_us": 1748030377748202, "hostname": "example-hostname", "pid": 1639453}}, "coll_perf": {{"coll": "AllReduce", "coll_sn": {number}, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": {us}, "coll_algobw_gbs": 277.210914, "coll_busbw_gbs": 485.119099}}}}"#
    )
}

fn read(text: &str) -> (Reader, u64) {
    let mut reader = Reader::default();
    let records = reader.add(Cursor::new(text)).unwrap();
    (reader, records)
}

#[test]
fn records_are_counted_by_rank_and_give_a_change_and_a_bandwidth() {
    let mut reader = Reader::default();
    for rank in 0..2 {
        // Each operation takes twice as long in the second half.
        let time = |number| if number < 50 { 100.0 } else { 200.0 };
        let lines: Vec<String> = (0..100)
            .map(|number| record(rank, number, time(number)))
            .collect();
        assert!(is_log(lines[0].as_bytes()));
        let records = reader.add(Cursor::new(lines.join("\n"))).unwrap();
        assert_eq!(records, 100);
    }
    let trends = reader.finish();
    assert_eq!(
        (trends.files, trends.records, trends.unread_lines),
        (2, 200, 0)
    );
    let [trend] = &trends.trends[..] else {
        panic!("all records are of one kind: {:?}", trends.trends);
    };
    assert_eq!((&*trend.function, trend.bytes), ("AllReduce", 1 << 34));
    assert_eq!(trend.change, Some(1.0));
    assert!((trend.bus_gbs.unwrap() - 485.119).abs() < 0.01);
    let ranks = trend.ranks.iter();
    let records: Vec<_> = ranks.map(|rank| (rank.rank, rank.records)).collect();
    assert_eq!(records, [(0, 100), (1, 100)]);
}

#[test]
fn a_header_holds_for_the_lines_after_it_and_other_objects_are_ignored() {
    let text = r#"
{"coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 8, "coll_exec_time_us": 3}}
{"header": {"id": "0xab", "comm_name": "tp", "rank": 1, "n_ranks": 4, "nnodes": 1}, "metadata": {"inspector_output_format_version": "v5.0"}, "dump_stats": {"coll_records": 1}}
{"coll_perf": {"coll": "AllGather", "coll_sn": 1, "coll_msg_size_bytes": 8, "coll_exec_time_us": 3}}
{"p2p_perf": {"p2p": "Send", "p2p_sn": 8, "p2p_peer": 1, "p2p_msg_size_bytes": 524288, "p2p_exec_time_us": 50, "p2p_busbw_gbs": 30.0}}
{"proxy_perf": {"record_sn": 4}}
"#;
    let (reader, records) = read(text);
    assert_eq!(records, 2);
    let trends = reader.finish();
    // The first line has no header above it.
    assert_eq!(trends.unread_lines, 1);
    let functions: Vec<_> = trends
        .trends
        .iter()
        .map(|trend| (&*trend.name, &*trend.function))
        .collect();
    assert_eq!(functions, [("tp", "Send"), ("tp", "AllGather")]);
    assert_eq!(trends.trends[1].bus_gbs, None);
    assert_eq!(trends.trends[1].change, None);
}

#[test]
fn lines_that_are_no_record_are_counted() {
    let torn = &record(0, 2, 5.0)[..90];
    let text = [
        record(0, 1, 5.0),
        "not JSON".to_owned(),
        "[1, 2]".to_owned(),
        record(7, 1, 5.0),
        record(0, 1, -1.0),
        r#"{"header": {"id": 3, "rank": -1, "n_ranks": 1e99}}"#.to_owned(),
        format!(r#"{{"header": "{}"}}"#, "x".repeat(MAX_LINE + 1)),
        "[".repeat(100_000),
        torn.to_owned(),
    ];
    let (reader, records) = read(&text.join("\n"));
    assert_eq!(records, 1);
    assert_eq!(reader.finish().unread_lines, 8);
    assert!(!is_log(b"{\"a\": 1}") && !is_log(b""));
}

#[test]
fn a_long_log_is_thinned_out_evenly() {
    let mut reader = Reader::default();
    let lines: Vec<String> = (0..10_000)
        .map(|number| record(0, number, number as f64))
        .collect();
    reader.add(Cursor::new(lines.join("\n"))).unwrap();
    let kept = reader.series.values().next().unwrap();
    assert!(kept.len() < MAX_SAMPLES, "{}", kept.len());
    let trends = reader.finish();
    let trend = &trends.trends[0];
    assert_eq!(trend.records, 10_000);
    assert!(
        (trend.median_us - 5_000.0).abs() < 300.0,
        "{}",
        trend.median_us
    );
    let last = trend.ranks[0].last_us.unwrap();
    assert!((last - 8_750.0).abs() < 300.0, "{last}");
}
