//! Uses windows on device memory, with libraries and devices that support them and with some that do not.

use super::groups::lines;
use super::libraries::without;
use super::{over, run};
use rcomm_tests::process::CULPRIT;

#[test]
fn data_put_into_a_window_is_visible_after_the_signal() {
    let (_job, outputs) = run("windows", |_, _| {});
    for output in outputs {
        assert!(output.contains("put, got and closed"), "{output}");
        let refused = lines(&output, "refused:");
        let sentences = [
            "reach beyond a window of 5200000",
            "is not in a group of 4 ranks",
            "the buffer has elements of type Float, the window of UInt32",
            "device memory, which the host cannot address",
            "can be made into a window",
            "the address of a window's memory must be a multiple of 4096 bytes",
        ];
        assert_eq!(refused.len(), sentences.len(), "{output}");
        for (sentence, refused) in sentences.iter().zip(refused) {
            assert!(refused.contains(sentence), "{sentence}: {output}");
        }
    }
}

#[test]
fn windows_can_be_read_and_closed_while_launches_are_not_finished() {
    let (_job, outputs) = run("windows_beside_launches", |_, command| {
        command
            .env("RCOMM_NCCL_BLOCKING", "0")
            .env("RCOMM_SIM", "launch_delay_ms=5");
    });
    for output in outputs {
        assert!(output.contains("closed beside launches"), "{output}");
    }
}

#[test]
fn windows_are_refused_with_the_reason_where_the_library_has_none() {
    let (_folder, old) = without(&["ncclCommWindowRegister"]);
    let (_job, outputs) = run("no_windows", |_, command| over(&old, command));
    for output in outputs {
        let sentence = "needs ncclCommWindowRegister (NCCL 2.27); this library is 2.30.7";
        assert!(
            lines(&output, "no window:")[0].contains(sentence),
            "{output}"
        );
    }
    for (fault, sentence) in [
        ("no_symmetric=1", "NCCL offers no symmetric memory"),
        ("no_one_sided=1", "NCCL offers no one-sided operations"),
    ] {
        let (_job, outputs) = run("no_windows", |_, command| {
            command.env("RCOMM_SIM", fault);
        });
        for output in outputs {
            assert!(
                lines(&output, "no window:")[0].contains(sentence),
                "{output}"
            );
        }
    }
    // A library without the query reports missing symmetric memory by returning no window.
    let (_folder, library) = without(&["ncclCommQueryProperties"]);
    let (_job, outputs) = run("no_windows", |_, command| {
        over(&library, command);
        command.env("RCOMM_SIM", "no_symmetric=1");
    });
    for output in outputs {
        let sentence = "NCCL returned no window";
        assert!(
            lines(&output, "no window:")[0].contains(sentence),
            "{output}"
        );
    }
}

#[test]
fn a_window_of_a_library_without_one_sided_operations_refuses_them_by_name() {
    let (_folder, old) = without(&["ncclPutSignal", "ncclWaitSignal", "ncclSignal"]);
    let (_job, outputs) = run("no_windows", |_, command| {
        over(&old, command);
        command.env("RCOMM_SIM", "no_reach=1");
    });
    for output in outputs {
        for (operation, sentence) in [
            ("put:", "needs ncclPutSignal (NCCL 2.29)"),
            ("signal:", "needs ncclPutSignal (NCCL 2.29)"),
            ("wait:", "needs ncclWaitSignal (NCCL 2.29)"),
            ("get:", "this device does not reach the memory of rank"),
        ] {
            assert!(
                lines(&output, operation)[0].contains(sentence),
                "{operation} {output}"
            );
        }
    }
}

#[test]
fn ranks_that_share_a_device_have_windows() {
    let (_job, outputs) = run("windows", |rank, command| {
        // Two of the four ranks share a device.
        let device = if rank == CULPRIT { 0 } else { rank };
        command
            .env("RCOMM_CUDA_DEVICE", device.to_string())
            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    });
    for output in outputs {
        assert!(output.contains("put, got and closed"), "{output}");
    }
}
