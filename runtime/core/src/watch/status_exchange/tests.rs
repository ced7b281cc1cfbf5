use super::report::PendingCollective;
use super::*;
use crate::store::{HashStore, TcpStore};
use rcomm_recorder::model::ProcessGroupStatus;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

fn query(members: &[Rank]) -> StatusQuery<'_> {
    StatusQuery {
        members,
        wire_id: 7,
        seq: 41,
        is_p2p: false,
        gone: &[],
        lost: &[],
        is_stopped: &|_| false,
        roll_call: None,
        waited_for: &[],
        timeout: Duration::from_secs(3),
    }
}

fn report(last: i64, phase: &str) -> RankReport {
    let status = ProcessGroupStatus {
        last_enqueued: last,
        ..ProcessGroupStatus::default()
    };
    RankReport {
        groups: BTreeMap::from([(wire_name(7), status)]),
        phase: phase.to_owned(),
        phase_ms: 6_100,
        step: -1,
        ..RankReport::default()
    }
}

fn exchange(rank: Rank, wait_time: Duration) -> StatusExchange {
    StatusExchange {
        rank,
        attempt: 0,
        alarm: 1,
        wait_time,
        read_time: Duration::from_secs(60),
    }
}

#[test]
fn a_wait_for_a_rank_that_waits_for_another_is_followed_to_its_end() {
    let store = HashStore::new();
    let exchange = exchange(1, Duration::ZERO);
    let publish = |rank: Rank, waits: &[(Rank, u64)]| {
        let report = RankReport {
            waits: waits.iter().copied().collect(),
            ..report(40, "")
        };
        let bytes = serde_json::to_vec(&report).unwrap();
        store.set(&exchange.key(rank), &bytes).unwrap();
    };
    let ask = |waited_for: &[Rank]| {
        let query = StatusQuery {
            waited_for,
            ..query(&[0, 1])
        };
        exchange.collect(&store, &query)
    };
    publish(1, &[(0, 3_000)]);
    // A wait that has just begun is not why this rank waits for rank 0.
    publish(0, &[(2, 20)]);
    assert!(ask(&[0]).last_in_chain.is_empty());
    // Rank 3 has left no report, and is no member of the group.
    publish(0, &[(2, 2_900)]);
    publish(2, &[(3, 2_800)]);
    let replies = ask(&[0]);
    assert_eq!(
        replies.cause_of_wait(&[0]).map(|cause| cause.ranks),
        Some(&[3][..])
    );
    let hops = "; rank 0 waits for rank 2; rank 2 waits for rank 3";
    assert!(replies.text.ends_with(hops), "{}", replies.text);
    // A cycle has no end, with this rank or without it.
    publish(2, &[(1, 2_800)]);
    assert!(ask(&[0]).last_in_chain.is_empty());
    publish(2, &[(0, 2_800)]);
    assert!(ask(&[0]).last_in_chain.is_empty());
}

#[test]
fn a_wait_is_followed_also_to_ranks_outside_of_the_group_that_answer_later() {
    let store = HashStore::new();
    let exchange = exchange(1, Duration::from_secs(60));
    let publish = |rank: Rank, waits: &[(Rank, u64)]| {
        let report = RankReport {
            waits: waits.iter().copied().collect(),
            ..report(40, "")
        };
        let bytes = serde_json::to_vec(&report).unwrap();
        store.set(&exchange.key(rank), &bytes).unwrap();
    };
    publish(0, &[(2, 2_900)]);
    publish(1, &[]);
    let replies = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            publish(2, &[(3, 2_900)]);
            publish(3, &[]);
        });
        let query = StatusQuery {
            waited_for: &[0],
            ..query(&[0, 1])
        };
        exchange.collect(&store, &query)
    });
    assert_eq!(replies.last_in_chain, [3]);
}

#[test]
fn a_rank_that_has_not_answered_a_roll_call_is_waited_for_only_briefly() {
    let store = HashStore::new();
    let publish = |rank: Rank| {
        let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
        published.expect("the store in memory failed");
    };
    [0, 1].into_iter().for_each(publish);
    // Rank 2 has answered only an earlier call.
    for (rank, number) in [(0, "2"), (1, "2"), (2, "1"), (3, "2")] {
        let key = format!("rcomm/here/0/{rank}");
        store.set(&key, number.as_bytes()).unwrap();
    }
    let minute = Duration::from_secs(60);
    let (text, took) = std::thread::scope(|scope| {
        scope.spawn(|| {
            // It answers the alarm later than a rank may that has not answered the call.
            std::thread::sleep(LOST_TIME * 2);
            publish(3);
        });
        let query = StatusQuery {
            roll_call: Some(RollCall {
                number: 2,
                age: minute,
            }),
            ..query(&[0, 1, 2, 3])
        };
        let began = Instant::now();
        let replies = exchange(0, minute).collect(&store, &query);
        (replies.text, began.elapsed())
    });
    let silent = "arrived: ranks 0, 1, 3; no answer: rank 2 (3 of 4 members answered)";
    assert_eq!(text, silent);
    assert!(took < minute / 2, "{took:?}");
}

#[test]
fn a_rank_has_the_whole_time_to_answer_from_a_roll_call_on() {
    let exchange = exchange(0, Duration::from_millis(1_500));
    let wait = |age| {
        let age = Duration::from_millis(age);
        exchange
            .wait_for_silent(RollCall { number: 1, age })
            .as_millis()
    };
    assert_eq!([0, 1_000, 1_400, 9_000].map(wait), [1_500, 500, 250, 250]);
}

#[test]
fn a_pending_collective_is_followed_to_the_members_that_have_not_come_to_it() {
    let store = HashStore::new();
    let exchange = exchange(1, Duration::ZERO);
    let publish = |rank: Rank, last_of_others: i64, waited_ms: u64| {
        let mut report = report(40, "");
        let status = ProcessGroupStatus {
            last_enqueued: last_of_others,
            ..ProcessGroupStatus::default()
        };
        report.groups.insert(wire_name(8), status);
        report.pending.push(PendingCollective {
            group: wire_name(8),
            seq: 78,
            members: vec![0, 2, 3],
            waited_ms,
        });
        let bytes = serde_json::to_vec(&report).unwrap();
        store.set(&exchange.key(rank), &bytes).unwrap();
    };
    let ask = || {
        let query = StatusQuery {
            waited_for: &[0],
            ..query(&[0, 1, 2, 3])
        };
        exchange.collect(&store, &query)
    };
    publish(1, 0, 0);
    publish(2, 78, 2_900);
    // A collective that has just begun is not why this rank waits for rank 0.
    publish(0, 78, 20);
    assert!(ask().last_in_chain.is_empty());
    // Rank 3 has left no report.
    publish(0, 78, 2_900);
    assert_eq!(
        ask().cause_of_wait(&[0]).map(|cause| cause.ranks),
        Some(&[3][..])
    );
    // All have come: the operation of the other group is not why.
    publish(3, 78, 2_900);
    assert!(ask().last_in_chain.is_empty());
    // Rank 0 has come to the operation that timed out, so the members that have not are followed.
    let mut came = report(41, "");
    let both = ProcessGroupStatus {
        last_enqueued: 78,
        ..ProcessGroupStatus::default()
    };
    came.groups.insert(wire_name(8), both);
    let came = serde_json::to_vec(&came).unwrap();
    for rank in [0, 1] {
        store.set(&exchange.key(rank), &came).unwrap();
    }
    publish(2, 78, 2_900);
    store.delete(&exchange.key(3)).unwrap();
    assert_eq!(
        ask().cause_of_wait(&[0]).map(|cause| cause.ranks),
        Some(&[3][..])
    );
}

#[test]
fn an_answer_does_not_show_whether_a_rank_has_come_to_a_message() {
    let store = HashStore::new();
    let exchange = exchange(0, Duration::ZERO);
    for rank in [0, 2] {
        let bytes = serde_json::to_vec(&report(18, "")).unwrap();
        store.set(&exchange.key(rank), &bytes).unwrap();
    }
    let ask = |members: &[Rank]| {
        let query = StatusQuery {
            is_p2p: true,
            ..query(members)
        };
        exchange.collect(&store, &query)
    };
    assert_eq!(
        ask(&[0, 2, 3]).cause_of_wait(&[]).map(|cause| cause.ranks),
        Some(&[3][..])
    );
    assert_eq!(ask(&[0, 2]).cause_of_wait(&[]), None);
}

#[test]
fn arrived_and_absent_ranks_are_listed_in_one_line() {
    let members = [0, 1, 2, 3];
    let store = HashStore::new();
    let short = Duration::from_millis(20);
    for (rank, last, phase) in [(0, 41, ""), (1, 42, "backward"), (2, 40, "load data")] {
        let published = exchange(rank, short).publish(&store, &report(last, phase));
        published.expect("the store in memory failed");
    }
    assert_eq!(
        exchange(0, short).collect(&store, &query(&members)).text,
        "arrived: ranks 0, 1; not arrived: rank 2 (last collective here is #40, in phase \
         \"load data\" for 6.1 s); no answer: rank 3 (3 of 4 members answered)"
    );
    let gone = StatusQuery {
        gone: &[3],
        ..query(&members)
    };
    let answers = exchange(0, Duration::from_secs(60)).collect(&store, &gone);
    assert_eq!((answers.arrived, answers.absent), (vec![0, 1], vec![2, 3]));
    let answers = answers.text;
    assert!(answers.ends_with("; gone: rank 3"), "{answers}");
}

#[test]
fn a_rank_to_which_a_connection_was_lost_is_asked_and_not_called_gone() {
    let store = HashStore::new();
    let members = [0, 1, 2, 3];
    for rank in [0, 1, 2] {
        let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
        published.expect("the store in memory failed");
    }
    let ask = |lost: &[Rank]| {
        let query = StatusQuery {
            lost,
            ..query(&members)
        };
        let asks = exchange(0, Duration::from_secs(60));
        let began = Instant::now();
        let text = asks.collect(&store, &query).text;
        (text, began.elapsed() < Duration::from_secs(30))
    };
    let silent = "arrived: ranks 0, 1, 2; no answer: rank 3 (3 of 4 members answered)";
    assert_eq!(ask(&[2, 3]), (silent.to_owned(), true));
    let published = exchange(3, Duration::ZERO).publish(&store, &report(41, ""));
    published.expect("the store in memory failed");
    let all = "arrived: ranks 0, 1, 2, 3";
    assert_eq!(ask(&[2, 3]), (all.to_owned(), true));
}

#[test]
fn the_answer_of_a_stopped_process_is_not_waited_for_but_read_if_it_is_there() {
    let store = HashStore::new();
    let members = [0, 1, 2, 3];
    let publish = |rank: Rank| {
        let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
        published.expect("the store in memory failed");
    };
    [0, 1, 3].into_iter().for_each(publish);
    let ask = || {
        let query = StatusQuery {
            is_stopped: &|rank| [2, 3].contains(&rank),
            ..query(&members)
        };
        let began = Instant::now();
        let replies = exchange(0, Duration::from_secs(60)).collect(&store, &query);
        (replies.text, began.elapsed() < Duration::from_secs(30))
    };
    // Rank 3 answered before it was stopped.
    let silent = "arrived: ranks 0, 1, 3; no answer: rank 2 (3 of 4 members answered)";
    assert_eq!(ask(), (silent.to_owned(), true));
}

#[test]
fn the_answer_of_a_process_that_was_stopped_for_a_moment_is_waited_for() {
    let store = HashStore::new();
    let publish = |rank: Rank| {
        let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
        published.expect("the store in memory failed");
    };
    [0, 1, 3].into_iter().for_each(publish);
    let looks = AtomicU32::new(0);
    let (continued, runs) = mpsc::channel();
    let is_stopped = |rank| {
        let is_first = rank == 2 && looks.fetch_add(1, Ordering::Relaxed) == 0;
        if rank == 2 && !is_first {
            let _ = continued.send(());
        }
        is_first
    };
    let replies = std::thread::scope(|scope| {
        scope.spawn(move || {
            // It answers only after more time than a process that stays stopped has.
            let seen = runs.recv_timeout(Duration::from_secs(60));
            std::thread::sleep(STOPPED_TIME * 2);
            seen.map(|()| publish(2))
        });
        let query = StatusQuery {
            is_stopped: &is_stopped,
            ..query(&[0, 1, 2, 3])
        };
        exchange(0, Duration::from_secs(60)).collect(&store, &query)
    });
    assert_eq!(replies.text, "arrived: ranks 0, 1, 2, 3");
}

#[test]
fn four_thousand_ranks_are_asked_once_and_the_answers_are_passed_on() {
    let store: Arc<TcpStore> = TcpStore::host("127.0.0.1", 0, Duration::from_secs(60))
        .expect("no port on the loopback interface")
        .into();
    let members: Vec<Rank> = (0..4096).collect();
    let silent = [17, 18, 1_000, 4_095];
    for &rank in members.iter().filter(|rank| !silent.contains(rank)) {
        let last = if rank == 300 { 40 } else { 41 };
        let published = exchange(rank, Duration::ZERO).publish(&*store, &report(last, ""));
        published.expect("the store failed");
    }
    let first = exchange(5, Duration::from_millis(50))
        .collect(&*store, &query(&members))
        .text;
    assert!(first.starts_with("arrived: ranks 0, 1, 2, 3,"), "{first}");
    for expected in [
        " and 4075 more; not arrived: rank 300 (last collective here is #40)",
        "; no answer: ranks 17, 18, 1000, 4095 (4092 of 4096 members answered)",
    ] {
        assert!(first.contains(expected), "{first}");
    }
    // The second rank does not read the answers again: late ones change nothing.
    exchange(17, Duration::ZERO)
        .publish(&*store, &report(41, ""))
        .expect("the store failed");
    let second = exchange(6, Duration::from_secs(60))
        .collect(&*store, &query(&members))
        .text;
    assert_eq!(second, first);
    // A request about another operation gets a separate answer.
    let other = StatusQuery {
        seq: 42,
        ..query(&members)
    };
    let third = exchange(6, Duration::from_millis(50))
        .collect(&*store, &other)
        .text;
    assert!(third.starts_with("arrived: none;"), "{third}");
}

#[test]
fn a_summary_accuses_no_rank_that_the_answers_themselves_would_not() {
    let store = HashStore::new();
    let members: Vec<Rank> = (0..100).collect();
    for &rank in members.iter().filter(|rank| ![6, 40].contains(rank)) {
        let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
        published.expect("the store in memory failed");
    }
    let ask = |rank: Rank, is_p2p: bool, waited_for: &[Rank]| {
        let query = StatusQuery {
            is_p2p,
            waited_for,
            ..query(&members)
        };
        let replies = exchange(rank, Duration::ZERO).collect(&store, &query);
        let cause = replies.cause_of_wait(waited_for);
        cause.map(|cause| cause.ranks.to_vec())
    };
    // Rank 3 has answered, which does not show that it has come to the message: it stays the one that is named.
    assert_eq!([5, 7].map(|rank| ask(rank, true, &[3])), [None, None]);
    // Rank 3 has come to the collective of the same number. Rank 6 asks, so it has come, too.
    assert_eq!(ask(5, false, &[3]), Some(vec![6, 40]));
    assert_eq!(ask(7, false, &[3]), Some(vec![6, 40]));
    assert_eq!(ask(6, false, &[3]), Some(vec![40]));
}

#[test]
fn no_rank_is_named_if_the_store_has_lost_this_ranks_own_answer() {
    let store = HashStore::new();
    // Rank 0 has published its answer before it asks, but only that of rank 1 is there.
    let published = exchange(1, Duration::ZERO).publish(&store, &report(41, ""));
    published.expect("the store in memory failed");
    let replies = exchange(0, Duration::ZERO).collect(&store, &query(&[0, 1, 2]));
    assert_eq!(
        replies.text,
        "the answers of the members cannot be read from the store"
    );
    assert_eq!(replies.cause_of_wait(&[]), None);
}

#[test]
fn answers_that_are_not_passed_on_are_reported_missing() {
    let store = HashStore::new();
    let members: Vec<Rank> = (0..100).collect();
    let asking = exchange(0, Duration::ZERO).key(format_args!("{}/41/asking", wire_name(7)));
    store.add(&asking, 1).expect("the store in memory failed");
    let second = StatusExchange {
        read_time: Duration::ZERO,
        ..exchange(1, Duration::from_millis(10))
    };
    let answers = second.collect(&store, &query(&members)).text;
    assert!(
        answers.starts_with("the answers of the 100 members were not passed on: key"),
        "{answers}"
    );
}
