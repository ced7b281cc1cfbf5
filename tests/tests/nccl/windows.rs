//! Windows on device memory, where the library and the devices have them and where they have not.

use super::groups::lines;
use super::libraries::without;
use super::{over, run};

#[test]
fn what_is_put_into_a_window_is_there_after_its_signal() {
    let (_job, said) = run("windows", |_, _| {});
    for said in said {
        assert!(said.contains("put, got and closed"), "{said}");
        let refused = lines(&said, "refused:");
        for (sentence, refused) in [
            "reach beyond a window of 5200000",
            "is not in a group of 4 ranks",
            "Float for a window of UInt32",
            "device memory, which the host cannot address",
            "can be made into a window",
        ]
        .iter()
        .zip(refused)
        {
            assert!(refused.contains(sentence), "{sentence}: {said}");
        }
    }
}

#[test]
fn windows_are_refused_by_name_where_there_are_none() {
    let (_folder, old) = without(&["ncclCommWindowRegister"]);
    let (_job, said) = run("no_windows", |_, command| over(&old, command));
    for said in said {
        let sentence = "needs ncclCommWindowRegister (NCCL 2.27); this library is 2.30.7";
        assert!(lines(&said, "no window:")[0].contains(sentence), "{said}");
    }
    for (order, sentence) in [
        ("no_symmetric=1", "NCCL offers no symmetric memory"),
        ("no_one_sided=1", "NCCL offers no one-sided operations"),
    ] {
        let (_job, said) = run("no_windows", |_, command| {
            command.env("RCOMM_SIM", order);
        });
        for said in said {
            assert!(lines(&said, "no window:")[0].contains(sentence), "{said}");
        }
    }
    // A library without the query reports it by giving no window.
    let (_folder, mute) = without(&["ncclCommQueryProperties"]);
    let (_job, said) = run("no_windows", |_, command| {
        over(&mute, command);
        command.env("RCOMM_SIM", "no_symmetric=1");
    });
    for said in said {
        let sentence = "NCCL returned no window";
        assert!(lines(&said, "no window:")[0].contains(sentence), "{said}");
    }
}

#[test]
fn a_window_of_a_library_without_one_sided_operations_refuses_them_by_name() {
    let (_folder, old) = without(&["ncclPutSignal", "ncclWaitSignal", "ncclSignal"]);
    let (_job, said) = run("no_windows", |_, command| {
        over(&old, command);
        command.env("RCOMM_SIM", "no_reach=1");
    });
    for said in said {
        for (what, sentence) in [
            ("put:", "needs ncclPutSignal (NCCL 2.29)"),
            ("signal:", "needs ncclPutSignal (NCCL 2.29)"),
            ("wait:", "needs ncclWaitSignal (NCCL 2.29)"),
            ("get:", "this device does not reach the memory of rank"),
        ] {
            assert!(lines(&said, what)[0].contains(sentence), "{what} {said}");
        }
    }
}
