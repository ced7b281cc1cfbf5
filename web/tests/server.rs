//! `rcomm-web` as a user runs it: a process on dumps, rings or a simulated job, queried over a real socket.

mod common;

use common::rings::{issue_overdue_barrier, ring};
use common::{Web, dumps_of, form_of, wait_until};
use rcomm_analyzer::load::{LoadOptions, load, load_all};
use rcomm_analyzer::{Analysis, Policy, analyze};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

#[test]
fn report_names_the_rank_at_fault() {
    let web = Web::on_dumps("cascade-2x2x2", &[]);
    let answer = web.get("/api/v1/report", &[&web.authorized()]);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let report: Value = serde_json::from_str(&answer.body).expect("the text is JSON");
    assert_eq!(report["schema"], "rcomm.report/1");
    assert_eq!(report["verdict"], "stuck");
    assert_eq!(report["findings"][0]["code"], "E101");
    assert_eq!(
        report["findings"][0]["culprit_ranks"],
        serde_json::json!([5])
    );
}

#[test]
fn healthy_dumps_have_no_finding() {
    let web = Web::on_dumps("healthy-w4", &[]);
    let answer = web.get("/api/v1/report", &[&web.authorized()]);
    let report: Value = serde_json::from_str(&answer.body).expect("the text is JSON");
    assert_eq!(
        (&report["verdict"], &report["findings"]),
        (&"healthy".into(), &serde_json::json!([]))
    );
}

#[test]
fn requests_without_the_token_are_refused() {
    let web = Web::on_dumps("healthy-w4", &[]);
    for path in [
        "/",
        "/api/v1/report",
        "/api/v1/events",
        "/metrics",
        "/assets/app.js",
    ] {
        let answer = web.get(path, &[]);
        assert_eq!(answer.status, 401, "{path}: {}", answer.body);
        assert_eq!(
            web.get(path, &["Authorization: Bearer wrong"]).status,
            401,
            "{path}"
        );
    }
    assert_eq!(web.get("/healthz", &[]).status, 200);
}

#[test]
fn printed_address_leads_to_the_page_and_leaves_the_token_in_a_cookie() {
    let web = Web::on_dumps("healthy-w4", &[]);
    let token = web.token.clone().expect("a token was printed");
    let moved = web.get(&format!("/?token={token}"), &[]);
    assert_eq!(moved.status, 303);
    assert!(
        moved.head.contains("location: /\r\n") || moved.head.ends_with("location: /"),
        "{}",
        moved.head
    );
    assert!(
        moved.head.contains("httponly; samesite=strict"),
        "{}",
        moved.head
    );
    let (_, value) = moved
        .head
        .split_once("set-cookie: ")
        .expect("the answer sets a cookie");
    let (cookie, _) = value.split_once(';').expect("the cookie has attributes");
    let name = format!("rcomm_session_{}=", web.address.port());
    assert!(cookie.starts_with(&name), "{cookie}");
    assert!(!cookie.contains(&token), "the cookie contains the token");
    let refused = web.get("/", &[&format!("Cookie: {name}{token}")]);
    assert_eq!(refused.status, 401);
    let page = web.get("/", &[&format!("Cookie: {cookie}")]);
    assert_eq!(page.status, 200);
    assert!(page.body.contains("/assets/app.js"));
    assert!(
        page.head
            .contains("content-security-policy: default-src 'none'"),
        "{}",
        page.head
    );
}

#[test]
fn foreign_hosts_and_origins_are_refused() {
    let web = Web::on_dumps("healthy-w4", &["--host-name", "n07.cluster"]);
    let token = web.authorized();
    assert_eq!(
        web.get("/api/v1/report", &[&token, "Host: evil.example"])
            .status,
        421
    );
    assert_eq!(
        web.get("/api/v1/report", &[&token, "Host: n07.cluster:8765"])
            .status,
        200
    );
    assert_eq!(
        web.get("/api/v1/report", &[&token, "Origin: http://evil.example"])
            .status,
        403
    );
    let same_origin = format!("Origin: http://{}", web.address);
    assert_eq!(
        web.get("/api/v1/report", &[&token, &same_origin]).status,
        200
    );
}

#[test]
fn event_stream_begins_with_the_current_snapshot() {
    let web = Web::on_dumps("cascade-2x2x2", &[]);
    let mut stream = web.connect();
    let request = format!(
        "GET /api/v1/events HTTP/1.1\r\nHost: {}\r\n{}\r\n\r\n",
        web.address,
        web.authorized()
    );
    stream
        .write_all(request.as_bytes())
        .expect("the server listens");
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let data = lines
        .filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
        .next()
        .expect("the stream has an event");
    let message: Value = serde_json::from_str(&data).expect("the text is JSON");
    assert_eq!(
        message["report"]["findings"][0]["culprit_ranks"],
        serde_json::json!([5])
    );
    assert_eq!(message["status"]["ranks"], 8);
    assert_eq!(message["focus"]["rows"][0]["cells"][0], "completed");
}

#[test]
fn unknown_paths_say_where_to_look() {
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let answer = web.get("/api/v2/report", &[]);
    assert_eq!(answer.status, 404);
    assert!(answer.body.contains("GET /api/v1 lists"), "{}", answer.body);
    assert_eq!(web.get("/assets/..%2f..%2fetc%2fpasswd", &[]).status, 404);
}

#[test]
fn metrics_have_two_formats_and_promtool_accepts_the_text() {
    let web = Web::on_dumps("cascade-2x2x2", &["--no-token"]);
    let text = web.get("/metrics", &[]);
    assert!(
        text.head.contains("text/plain; version=0.0.4"),
        "{}",
        text.head
    );
    assert!(
        text.body
            .contains("rcomm_verdict_info{verdict=\"stuck\"} 1"),
        "{}",
        text.body
    );
    assert!(
        text.body
            .contains("rcomm_findings{code=\"E101\",name=\"not_joined\",severity=\"error\"} 1")
    );
    let open = web.get(
        "/metrics",
        &["Accept: application/openmetrics-text; version=1.0.0"],
    );
    assert!(
        open.head.contains("application/openmetrics-text"),
        "{}",
        open.head
    );
    assert!(open.body.ends_with("# EOF\n"), "{}", open.body);
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else {
        let _ = writeln!(
            std::io::stderr(),
            "skipped the lint: promtool is not installed"
        );
        return;
    };
    promtool
        .stdin
        .take()
        .expect("the stream is piped")
        .write_all(text.body.as_bytes())
        .expect("promtool reads");
    let linted = promtool.wait_with_output().expect("promtool ends");
    assert!(
        linted.status.success(),
        "{}{}",
        String::from_utf8_lossy(&linted.stdout),
        String::from_utf8_lossy(&linted.stderr)
    );
}

#[test]
fn sigterm_ends_the_server_also_while_a_stream_is_open() {
    let mut web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let mut stream = web.connect();
    write!(
        stream,
        "GET /api/v1/events HTTP/1.1\r\nHost: {}\r\n\r\n",
        web.address
    )
    .expect("the server listens");
    let mut first = [0_u8; 12];
    stream.read_exact(&mut first).expect("the stream is open");
    assert_eq!(&first, b"HTTP/1.1 200");
    assert!(web.stop().success());
}

#[test]
fn the_log_is_text_or_one_json_object_per_line_and_never_has_the_token() {
    let log_of = |args: &[&str]| {
        let mut all = vec!["--demo", "healthy"];
        all.extend(args);
        let mut web = Web::start_with(&all, |command| {
            command.stderr(Stdio::piped());
        });
        web.wait_until_ready();
        assert!(web.stop().success());
        let mut text = String::new();
        let mut log = web.child.stderr.take().expect("the stream is piped");
        log.read_to_string(&mut text).expect("the log is UTF-8");
        let token = web.token.as_deref().expect("a token was printed");
        assert!(!text.contains(token), "the token is in the log: {text}");
        (web.address.to_string(), text)
    };
    let (address, text) = log_of(&["--log-format", "json"]);
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let message = |line: &Value| line["fields"]["message"].as_str().map(str::to_owned);
    let messages: Vec<_> = lines.iter().filter_map(message).collect();
    assert_eq!(messages, ["serving", "stopped"]);
    assert_eq!(lines[0]["level"], "INFO");
    assert_eq!(lines[0]["fields"]["address"], address);
    assert!(lines[0]["timestamp"].is_string(), "{}", lines[0]);
    let (address, text) = log_of(&[]);
    let first = text.lines().next().expect("the log has a line");
    assert!(
        first.contains("INFO") && first.contains(&address),
        "{first}"
    );
    assert!(serde_json::from_str::<Value>(first).is_err(), "{first}");
}

/// Events of the stream: name and data.
fn events(web: &Web) -> impl Iterator<Item = (String, Value)> {
    let mut stream = web.connect();
    write!(
        stream,
        "GET /api/v1/events HTTP/1.1\r\nHost: {}\r\n\r\n",
        web.address
    )
    .expect("the server listens");
    let mut name = String::new();
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.filter_map(move |line| {
        if let Some(event) = line.strip_prefix("event: ") {
            name = event.to_owned();
        }
        let data = line.strip_prefix("data: ")?;
        Some((
            name.clone(),
            serde_json::from_str(data).expect("the text is JSON"),
        ))
    })
}

#[test]
fn deltas_applied_to_the_first_snapshot_give_the_later_ones() {
    let web = Web::demo("stuck", 16, &["--no-token"]);
    let mut events = events(&web);
    let (name, mut picture) = events.next().expect("the stream has an event");
    assert_eq!(name, "picture");
    let mut deltas = 0;
    while picture["report"]["verdict"] != "stuck" {
        let (name, data) = events.next().expect("the job gets stuck");
        if name == "picture" {
            picture = data;
            continue;
        }
        assert_eq!(data["base"], picture["status"]["number"]);
        deltas += 1;
        picture["status"] = data["status"].clone();
        picture["focus"] = data["focus"].clone();
        for (section, value) in data["set"].as_object().expect("the delta has sections") {
            picture["report"][section] = value.clone();
        }
        for (section, rows) in data["rows"].as_object().expect("the delta has sections") {
            for (index, row) in rows.as_object().expect("the value has rows") {
                let index: usize = index.parse().expect("the key is an index");
                picture["report"][section][index] = row.clone();
            }
        }
    }
    assert!(deltas > 0);
    let number = picture["status"]["number"]
        .as_u64()
        .expect("the value is a number");
    let kept = web.get(&format!("/api/v1/picture?at={number}"), &[]);
    assert_eq!(kept.json(), picture);
    let culprit = &picture["report"]["findings"][0]["culprit_ranks"];
    assert_eq!(*culprit, serde_json::json!([13]));
}

#[test]
fn earlier_snapshots_can_be_requested() {
    let web = Web::demo("stuck", 16, &["--no-token"]);
    let points = wait_until("the job to be stuck", || {
        let history = web.get("/api/v1/history", &[]).json();
        let points = history["points"].as_array().cloned()?;
        (points.last()?["verdict"] == "stuck").then_some(points)
    });
    let before = points.iter().find(|point| point["verdict"] == "running");
    let number = &before.expect("the job ran before")["number"];
    let report = web.get(&format!("/api/v1/report?at={number}"), &[]).json();
    assert_eq!(report["verdict"], "running");
    let selected = web.get(&format!("/api/v1/select?at={number}&filter=rank:3"), &[]);
    assert_eq!(selected.json()["ranks"], serde_json::json!([3]));
    let gone = web.get("/api/v1/picture?at=999999", &[]);
    assert_eq!(gone.status, 404);
    assert!(gone.body.contains("/api/v1/history"), "{}", gone.body);
}

#[test]
fn a_filter_that_cannot_be_read_is_refused_with_its_column() {
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let refused = web.get("/api/v1/select?filter=rank:3%20hots:n07", &[]);
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("(column 8)"), "{}", refused.body);
}

/// Every answer in JSON to a GET, and the head of the records, matches the OpenAPI description, which covers every
/// route.
#[test]
fn answers_match_the_description() {
    let web = Web::on_dumps("cascade-2x2x2", &["--no-token"]);
    let api = web.get("/api/v1/openapi.json", &[]).json();
    let mut described: Vec<&String> = api["paths"]
        .as_object()
        .expect("the description has paths")
        .keys()
        .collect();
    described.sort();
    let listed = web.get("/api/v1", &[]).json();
    let mut listed: Vec<String> = serde_json::from_value(listed).expect("the value is a list");
    listed.sort();
    assert_eq!(described, listed.iter().collect::<Vec<_>>());
    let report = web.get("/api/v1/report", &[]).json();
    let group = &report["groups"][0]["group"]["name"];
    let group = group.as_str().expect("the name is a text");
    let mut compared = 0;
    for (path, route) in api["paths"].as_object().expect("the description has paths") {
        let schema = &route["get"]["responses"]["200"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        let query = match path.as_str() {
            "/api/v1/explain" => "?code=E101".to_owned(),
            "/api/v1/select" => "?filter=rank:0-3".to_owned(),
            "/api/v1/matrix" => format!("?group={group}&each=true"),
            "/api/v1/timeline" => "?seconds=100000".to_owned(),
            _ => String::new(),
        };
        let answer = web.get(&format!("{path}{query}"), &[]);
        assert_eq!(answer.status, 200, "{path}{query}: {}", answer.body);
        assert_described(&api, schema, &answer.json(), path);
        compared += 1;
    }
    assert!(compared >= 10, "{compared}");
    // The records follow this head as bytes.
    let records = web.get("/api/v1/records", &[]).body;
    let (head, rest) = records
        .split_once('\n')
        .expect("the records start with a head");
    let head: Value = serde_json::from_str(head).expect("the text is JSON");
    let schema = serde_json::json!({ "$ref": "#/components/schemas/RecordsHead" });
    assert_described(&api, &schema, &head, "/api/v1/records");
    let lengths = head["records"]
        .as_array()
        .expect("the value is a list")
        .iter();
    let lengths = lengths.map(|record| record["bytes"].as_u64().expect("the value is a length"));
    assert_eq!(lengths.sum::<u64>(), rest.len() as u64);
}

/// The description has all fields of a report and of its `input`, for a job whose size no record states.
#[test]
fn a_report_that_may_lack_ranks_matches_the_description() {
    let native = dumps_of("healthy-native-w2").replace("/pickle", "/json");
    let (loaded, _) =
        load_all(&[native.into()], &LoadOptions::default()).expect("the dumps are read");
    let dumps = loaded.into_iter().map(|loaded| {
        let mut dump = loaded.dump;
        // gloo's own recorder names the members of the newest group only, here those of a group other than the world.
        for group in &mut dump.groups {
            if group.info.desc == "default_pg" {
                (group.info.name, group.info.desc) = ("1".to_owned(), "tp".to_owned());
            }
        }
        dump
    });
    let report = analyze(&dumps.collect::<Vec<_>>(), &Policy::default());
    let report = serde_json::to_value(report).expect("a report can be written as JSON");
    assert_eq!(report["input"]["may_have_more"], true, "{report}");
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let mut api = web.get("/api/v1/openapi.json", &[]).json();
    // A field that is not described is an error here.
    for schema in [
        "/components/schemas/Report",
        "/components/schemas/Report/properties/input",
    ] {
        let schema = api
            .pointer_mut(schema)
            .expect("the description has the schema");
        schema["additionalProperties"] = false.into();
    }
    let schema = serde_json::json!({ "$ref": "#/components/schemas/Report" });
    assert_described(&api, &schema, &report, "/api/v1/report");
}

/// Checks a value against a schema of the description.
fn assert_described(api: &Value, schema: &Value, answer: &Value, what: &str) {
    let mut schema = schema.clone();
    schema["components"] = api["components"].clone();
    let validator = jsonschema::validator_for(&schema).expect("the schema is valid");
    let errors: Vec<String> = validator
        .iter_errors(answer)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{what}: {errors:#?}");
}

#[test]
fn uploaded_dumps_get_a_separate_report() {
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let folder = std::fs::read_dir(dumps_of("cascade-2x2x2")).expect("fixtures are checked in");
    let files: Vec<(String, Vec<u8>)> = folder
        .map(|entry| {
            let path = entry.expect("the path is readable").path();
            let name = path
                .file_name()
                .expect("the path names a file")
                .to_string_lossy();
            (
                format!("dumps/{name}"),
                std::fs::read(&path).expect("the path is readable"),
            )
        })
        .collect();
    let (kind, body) = form_of(files.iter().map(|(name, bytes)| (&**name, &**bytes, None)));
    let answer = web.ask("POST", "/api/v1/uploads", &[&kind], &body);
    assert_eq!(answer.status, 201, "{}", answer.body);
    let upload = answer.json();
    let id = upload["id"].as_str().expect("the id is a text");
    let report = web.get(&format!("/api/v1/report?upload={id}"), &[]).json();
    assert_eq!(
        report["findings"][0]["culprit_ranks"],
        serde_json::json!([5])
    );
    let page = web.get(upload["url"].as_str().expect("the URL is a text"), &[]);
    assert_eq!(page.status, 200);
    let trace = web.get(&format!("/api/v1/perfetto?upload={id}"), &[]);
    assert!(trace.head.contains("attachment"), "{}", trace.head);
    assert!(
        trace.json()["traceEvents"]
            .as_array()
            .is_some_and(|it| it.len() > 20)
    );
    // The live snapshot is unchanged.
    assert_eq!(web.get("/api/v1/report", &[]).json()["verdict"], "healthy");
    assert_eq!(web.get("/api/v1/report?upload=0123", &[]).status, 404);
}

#[test]
fn an_upload_is_judged_by_the_times_that_its_form_states_as_the_files_are() {
    let web = Web::on_dumps("healthy-w4", &["--no-token"]);
    let package = env!("CARGO_MANIFEST_DIR");
    let source = format!("{package}/../analyzer/tests/fixtures/early_dump");
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    // The file of rank 1 is older than the others. The times are in ms after `issued_ms`.
    let issued_ms = 1_795_238_776_000;
    let files: Vec<(String, Vec<u8>, u64)> = [(0, 317_000), (1, 2_000), (2, 317_000), (3, 317_000)]
        .map(|(rank, after_ms)| {
            let name = format!("nccl_trace_rank_{rank}");
            let bytes = std::fs::read(format!("{source}/{name}")).expect("the dump is readable");
            let written_ms = issued_ms + after_ms;
            let path = folder.path().join(&name);
            std::fs::write(&path, &bytes).expect("the folder is writable");
            let written = std::time::UNIX_EPOCH + std::time::Duration::from_millis(written_ms);
            let file = std::fs::File::options().write(true).open(path);
            let set = file.and_then(|file| file.set_modified(written));
            set.expect("the time can be set");
            (name, bytes, written_ms)
        })
        .into();
    let summary_of = |report: &Value| {
        let finding = &report["findings"][0];
        let keys = ["code", "culprit_ranks", "confidence", "sentence"];
        let values = keys.map(|key| finding[key].to_string());
        (report["verdict"].to_string(), values)
    };
    let upload = |states_times: bool| {
        let files = files.iter();
        let (kind, body) = form_of(files.map(|(name, bytes, written_ms)| {
            (&**name, &**bytes, states_times.then_some(*written_ms))
        }));
        let answer = web.ask("POST", "/api/v1/uploads", &[&kind], &body);
        assert_eq!(answer.status, 201, "{}", answer.body);
        let id = answer.json()["id"].as_str().expect("a text").to_owned();
        let report = format!("/api/v1/report?upload={id}");
        summary_of(&web.get(&report, &[]).json())
    };
    let mut analysis = Analysis::new(Policy::default());
    let paths = [folder.path().to_owned()];
    load(&paths, &LoadOptions::default(), |dump| {
        dump.add_to(&mut analysis);
    })
    .expect("the folder is readable");
    let report = serde_json::to_value(analysis.finish()).expect("a report has a JSON form");
    let report_of_files = summary_of(&report);
    assert_eq!(report_of_files.1[0], "\"E102\"", "{report_of_files:?}");
    assert_eq!(upload(true), report_of_files);
    // The time of the upload itself is not that of the files.
    assert_eq!(upload(false).1[0], "\"E101\"");
}

#[test]
fn jobs_are_listed_trouble_first_and_another_job_can_be_requested_by_name() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let stuck = [0, 1].map(|rank| ring(directory.path(), "stuck", rank));
    issue_overdue_barrier(&stuck[0]);
    let ring_dir = directory.path().to_str().expect("the path is UTF-8");
    let web = Web::start(&["--no-token", "--ring-dir", ring_dir, "--refresh", "100ms"]);
    web.wait_until_ready();
    let _second = ring(directory.path(), "second", 0);
    let _third = ring(directory.path(), "third", 0);
    let listed = wait_until("three jobs, one of them stuck", || {
        let jobs = web.get("/api/v1/jobs", &[]).json()["jobs"].clone();
        let jobs = jobs.as_array().expect("the value is a list").clone();
        (jobs.len() == 3 && jobs[0]["verdict"] == "stuck").then_some(jobs)
    });
    let column = |key: &str| listed.iter().map(|job| &job[key]).collect::<Vec<_>>();
    assert_eq!(column("name"), ["stuck", "third", "second"]);
    assert_eq!(column("shown"), [true, false, false]);
    assert_eq!(column("in_trouble"), [true, false, false]);
    assert_eq!(
        (&listed[0]["alive"], &listed[0]["ranks"]),
        (&2.into(), &2.into())
    );
    // The list and the report name the same rank.
    let report = web.get("/api/v1/report", &[]).json();
    assert_eq!(report["verdict"], "stuck");
    let sentence = report["findings"][0]["sentence"]
        .as_str()
        .expect("the value is a text");
    let line = listed[0]["sentence"].as_str().expect("the value is a text");
    assert!(line.contains("rank 1"), "{line}");
    assert!(sentence.contains("rank 1"), "{sentence}");
    // The report states the age at the time of the answer, not at that of the last analysis.
    wait_until("two ages of a finding in one snapshot", || {
        let number = || web.get("/api/v1/status", &[]).json()["number"].clone();
        let age = || web.get("/api/v1/report", &[]).json()["findings"][0]["age_ms"].as_f64();
        let number_before = number();
        let (first, second) = (age()?, age()?);
        (first < second && number_before == number()).then_some(())
    });
    assert_eq!(web.get("/api/v1/status", &[]).json()["job"], "stuck");
    let other = web.get("/api/v1/picture?job=third", &[]).json();
    assert_eq!(other["status"]["job"], "third");
    assert_eq!(other["report"]["findings"], serde_json::json!([]));
    // A request for another job does not change the job that the server shows.
    assert_eq!(web.get("/api/v1/status", &[]).json()["job"], "stuck");
    let unknown = web.get("/api/v1/report?job=fourth", &[]);
    assert_eq!(unknown.status, 404);
    assert!(unknown.body.contains("/api/v1/jobs"), "{}", unknown.body);
}
