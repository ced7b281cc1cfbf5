//! The views of the rings of plain NCCL processes have the same first finding: the first screen of `rcomm-top`, the API
//! of `rcomm-web`, and the report of `rcomm-fr`.

use crate::faults::{COUNT, all, with_one};
use crate::job::{Job, Until};
use clap::Parser as _;
use rcomm_analyzer::{Code, Policy, analyze, print};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The age from which a pending operation is overdue. It is longer than the end of a process takes to settle
/// ([`Policy::SETTLE`]), so that a killed rank is reported as killed before any operation is overdue.
const OVERDUE: Duration = Duration::from_secs(3);

/// What happens to the rank at fault after its last event.
#[derive(Clone, Copy)]
enum Then {
    GoesOn,
    IsKilled,
    IsStopped,
}

/// A fault of a job, and the finding that each view must show first.
struct Fault {
    name: &'static str,
    last: [(Until, usize); 4],
    rank: usize,
    then: Then,
    code: Code,
    culprits: &'static [u32],
    /// A part of the finding's sentence.
    sentence_part: &'static str,
    /// The events that are recorded.
    events: &'static str,
}

/// The events of the other tests, with the steps of transfers.
const STEPS: &str = "channels,steps,256";
/// No events are named, so that the default ones are recorded.
const DEFAULT: &str = "256";

fn faults() -> Vec<Fault> {
    let fault = |name, last, code, culprits, sentence_part| Fault {
        name,
        last,
        rank: 2,
        then: Then::GoesOn,
        code,
        culprits,
        sentence_part,
        events: STEPS,
    };
    let absent = with_one(2, Until::NotCalled, Until::Running);
    let mut mismatch = all(Until::Running);
    mismatch[2].1 = COUNT + 4;
    vec![
        fault(
            "never issued",
            absent,
            Code::E101,
            &[2],
            "rank 2 never issued all_reduce #6",
        ),
        fault(
            "issued and never launched",
            with_one(2, Until::Called, Until::Running),
            Code::E101,
            &[2],
            "rank 2 issued all_reduce #6",
        ),
        fault(
            "one channel stuck towards one peer",
            with_one(1, Until::OneChannelLeft, Until::OneChannelStarves),
            Code::E135,
            &[],
            "channel 3 from rank 1",
        ),
        Fault {
            events: DEFAULT,
            ..fault(
                "one channel stuck, by default",
                with_one(1, Until::OneChannelLeft, Until::OneChannelStarves),
                Code::E135,
                &[],
                "channel 3 has not finished",
            )
        },
        Fault {
            events: DEFAULT,
            ..fault(
                "never issued, by default",
                absent,
                Code::E101,
                &[2],
                "rank 2 never issued all_reduce #6",
            )
        },
        Fault {
            then: Then::IsKilled,
            ..fault("killed", absent, Code::E150, &[2], "rank 2")
        },
        Fault {
            then: Then::IsStopped,
            ..fault("frozen", absent, Code::E151, &[2], "rank 2")
        },
        fault("mismatch in count", mismatch, Code::E112, &[2], "rank 2"),
    ]
}

/// Not a test by itself: runs `rcomm-top` with the arguments in `RCOMM_TEST_TOP`, one per line.
#[test]
#[ignore = "the other tests run it as a separate process"]
fn top() {
    let Ok(arguments) = std::env::var("RCOMM_TEST_TOP") else {
        return;
    };
    let cli = rcomm_top::start::cli::Cli::parse_from(arguments.lines());
    let code = rcomm_top::start::start(cli, |_| None).expect("rings to show");
    std::process::exit(code.into());
}

/// What `rcomm-top` prints with these arguments.
fn rcomm_top(arguments: &[&str]) -> String {
    let output = Command::new(std::env::current_exe().expect("a file"))
        .args(["--exact", "views::top", "--nocapture", "--ignored"])
        .env(
            "RCOMM_TEST_TOP",
            format!("rcomm-top\n{}", arguments.join("\n")),
        )
        .stdin(Stdio::null())
        .output()
        .expect("this test program");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // 2 = it cannot tell yet.
    assert!(
        matches!(output.status.code(), Some(0..=2)),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// The report that the API of `rcomm-web` answers with; `None` before it has looked at the rings.
fn api_report(page: &rcomm_web::Page) -> Option<serde_json::Value> {
    let mut stream = TcpStream::connect(page.address()).expect("it listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a socket");
    write!(
        stream,
        "GET /api/v1/report HTTP/1.0\r\nHost: {}\r\nAuthorization: Bearer {}\r\n\r\n",
        page.address(),
        page.token()
    )
    .expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status");
    (status == "200").then(|| serde_json::from_str(body).expect("a report"))
}

/// Whether the report's first finding is an error; if so, it must be the fault's finding. `view` names the view in
/// messages.
fn is_right(report: &serde_json::Value, fault: &Fault, view: &str) -> bool {
    let first = &report["findings"][0];
    if first["severity"] != "error" {
        return false;
    }
    assert_eq!(
        first["code"],
        fault.code.id(),
        "{view}, {}: {first}",
        fault.name
    );
    let culprits: Vec<u64> = first["culprit_ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .filter_map(serde_json::Value::as_u64)
        .collect();
    let expected: Vec<u64> = fault.culprits.iter().copied().map(u64::from).collect();
    assert_eq!(culprits, expected, "{view}, {}: {first}", fault.name);
    let sentence = first["sentence"].as_str().expect("a sentence");
    assert!(
        sentence.contains(fault.sentence_part),
        "{view}, {}: {sentence}",
        fault.name
    );
    true
}

/// Waits until the condition is true; panics after two minutes. `awaited` names what is waited for.
fn wait_for(awaited: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < end, "{awaited} did not appear in time");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Kills or stops the rank at fault, if the fault asks for it.
fn bring_about(job: &mut Job, fault: &Fault) {
    match fault.then {
        Then::GoesOn => {}
        Then::IsKilled => job.kill(fault.rank),
        Then::IsStopped => job.stop(fault.rank),
    }
}

/// The first two lines of the printed report.
fn first_lines(report: &rcomm_analyzer::Report) -> String {
    let mut text = Vec::new();
    let layout = print::human::Layout::default();
    print::human::write(report, &layout, &mut text).expect("a vector takes every byte");
    let text = String::from_utf8(text).expect("text");
    text.lines().take(2).collect::<Vec<_>>().join("\n")
}

/// The code of an error in this word of a screen.
fn code_in(word: &str) -> Option<&str> {
    let word = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    let digits = word.strip_prefix('E')?;
    let is_code = digits.len() == 3 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_code.then_some(word)
}

/// Asserts that each view shows the fault's finding first.
fn assert_shown(directory: &Path, fault: &Fault, job: &Job) {
    let policy = Policy {
        world_size: Some(4),
        ..Policy::default()
    };
    let report = analyze(&job.dumps(), &policy);
    assert_eq!(
        (report.findings[0].code, &*report.findings[0].culprit_ranks),
        (fault.code, fault.culprits),
        "rcomm-fr, {}",
        fault.name
    );
    let printed = first_lines(&report);
    assert!(
        printed.contains(fault.sentence_part),
        "rcomm-fr, {}: {printed}",
        fault.name
    );

    let directory_text = directory.to_str().expect("text");
    let common = ["--ring-dir", directory_text, "--overdue", "3s"];
    wait_for("rcomm-top's finding", || {
        let text = rcomm_top(&[&["--json"], &common[..]].concat());
        let start = text.find('{').expect("a report");
        let mut reports = serde_json::Deserializer::from_str(&text[start..]).into_iter();
        let report: serde_json::Value = reports.next().expect("one").expect("JSON");
        is_right(&report, fault, "rcomm-top --json")
    });
    let screen = rcomm_top(&[&["--once"], &common[..]].concat());
    // The screen wraps long lines.
    let words: Vec<&str> = screen.split_whitespace().collect();
    let screen_text = words.join(" ");
    let first_code = words.iter().find_map(|word| code_in(word));
    assert!(
        screen_text.contains(fault.sentence_part) && first_code == Some(fault.code.id()),
        "rcomm-top, {}:\n{screen}",
        fault.name
    );

    let mut options = rcomm_web::Options {
        ring_dir: Some(directory.to_owned()),
        ..rcomm_web::Options::default()
    };
    options.live.policy.overdue = OVERDUE;
    let page = rcomm_web::serve(options).expect("a port");
    wait_for("rcomm-web's finding", || {
        api_report(&page).is_some_and(|report| is_right(&report, fault, "rcomm-web"))
    });
}

#[test]
fn every_view_shows_each_fault() {
    // In parallel, because most of the time the views wait for operations to become overdue.
    std::thread::scope(|scope| {
        for fault in faults() {
            scope.spawn(move || {
                let mut job = Job::start(6, fault.last, |command| {
                    command.env("RCOMM_NCCL_EVENTS", fault.events);
                });
                bring_about(&mut job, &fault);
                assert_shown(job.directory.path(), &fault, &job);
            });
        }
    });
}
