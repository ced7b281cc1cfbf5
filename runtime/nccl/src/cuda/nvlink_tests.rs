//! Tests of the detection of links, on an imitation of NVML in C.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use super::*;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

/// An imitation of NVML with four devices. 0 and 1 have two links with each other. 0 also has an inactive link to 1, a
/// link to a device of another host, and one to a processor. 1 has three links to switches, and 2 has two. Of two more
/// active links of 2, NVML knows for one not even whether it leads to a device, and for the other not to which device.
/// 3 has no NVLink.
const SOURCE: &str = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
typedef struct { unsigned active, type; const char *bus_id; } far_end;
static const char *ids[] = {"00000000:1A:00.0", "00000000:1B:00.0", "00000000:1C:00.0", "00000000:1D:00.0"};
static const far_end links[3][7] = {
    {{1, 0, "00000000:1b:00.0"}, {0, 0, "00000000:1B:00.0"}, {1, 0, "00000000:1B:00.0"}, {1, 0, "00000000:FF:00.0"}, {1, 1, ""}, {0, 0, ""}, {0, 0, ""}},
    {{1, 0, "00000000:1A:00.0"}, {1, 2, ""}, {1, 2, ""}, {1, 0, "00000000:1A:00.0"}, {1, 2, ""}, {0, 0, ""}, {0, 0, ""}},
    {{1, 2, ""}, {1, 9, ""}, {1, 0, NULL}, {0, 2, ""}, {0, 0, ""}, {0, 0, ""}, {1, 2, ""}},
};
static int users;
int begun;
volatile int hangs = HANGS;
int nvmlInit_v2(void) { __atomic_add_fetch(&begun, 1, __ATOMIC_SEQ_CST); while (hangs) usleep(1000); users++; return REFUSES ? 9 : 0; }
int nvmlShutdown(void) { return --users < 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "other"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return users == 1 ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)&ids[index]; return 0; }
static int index_of(void *device) { return (int)((const char **)device - ids); }
int nvmlDeviceGetPciInfo_v3(void *device, pci *info) { strcpy(info->bus_id, ids[index_of(device)]); return 0; }
int nvmlDeviceGetNvLinkState(void *device, unsigned number, unsigned *active) {
    if (index_of(device) == 3) return 3;
    if (number >= 7) return 2;
    if (number == 3 && index_of(device) == 2) return 3;
    *active = links[index_of(device)][number].active;
    return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned number, unsigned *type) {
    *type = links[index_of(device)][number].type;
    return *type == 9 ? 3 : 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned number, pci *info) {
    const char *bus_id = links[index_of(device)][number].bus_id;
    if (bus_id == NULL) return 3;
    strcpy(info->bus_id, bus_id);
    return 0;
}
"#;

const LONG: Duration = Duration::from_secs(60);

/// Builds the imitation, with one of the macros `REFUSES` and `HANGS` set to 1 or none; `None`, and says so, if there
/// is no compiler.
fn imitation(folder: &Path, fault: &str) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: there is no compiler cc");
        return None;
    }
    let source = folder.join("nvml.c");
    std::fs::write(&source, SOURCE).unwrap();
    let library = folder.join(format!("libimitation{fault}.so"));
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-Wall", "-Wno-unused-result", "-o"])
        .arg(&library);
    for name in ["REFUSES", "HANGS"] {
        compiler.arg(format!("-D{name}={}", u8::from(name == fault)));
    }
    let built = compiler.arg(&source).output().unwrap();
    let reason = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{reason}");
    Some(library)
}

#[test]
fn links_between_devices_and_over_switches_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let Some(library) = imitation(folder.path(), "") else {
        return;
    };
    // NVML is begun and ended by each call.
    for _ in 0..2 {
        let found = DmaConnectivity::nvlink(Some(&library), LONG).unwrap();
        let expected = ["1a", "1b", "1c", "1d"].map(|bus| format!("00000000:{bus}:00.0"));
        assert_eq!(found.bus_ids, expected);
        let links = [[0, 2, 0, 0], [2, 0, 2, 0], [0, 2, 0, 0], [0, 0, 0, 0]];
        assert_eq!(found.links, links);
    }
}

#[test]
fn a_library_that_is_not_there_or_does_not_start_is_an_error_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("no-such.so");
    let error = DmaConnectivity::nvlink(Some(&absent), LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains("no-such.so"), "{error}");
    let Some(library) = imitation(folder.path(), "REFUSES") else {
        return;
    };
    let error = DmaConnectivity::nvlink(Some(&library), LONG).unwrap_err();
    let expected = "nvmlInit_v2 failed: Driver Not Loaded";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn a_library_that_does_not_answer_is_left_at_the_deadline_and_the_call_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some(library) = imitation(folder.path(), "HANGS") else {
        return;
    };
    let time = Duration::from_millis(300);
    let error = DmaConnectivity::nvlink(Some(&library), time).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    // On a loaded machine the library may not even be loaded by then.
    let text = error.to_string();
    let at = ["nvmlInit_v2 has not returned", "dlopen has not returned"];
    assert!(at.iter().any(|at| text.contains(at)), "{text}");
    assert!(text.contains("within 300 ms"), "{text}");
}

#[test]
fn callers_that_try_again_wait_for_the_call_that_has_not_returned() {
    let folder = tempfile::tempdir().unwrap();
    let Some(path) = imitation(folder.path(), "HANGS") else {
        return;
    };
    // SAFETY: the imitation has no initializers.
    let library = unsafe { Library::new(&path) }.unwrap();
    // SAFETY: both are integers of the imitation, which is not unloaded while `library` lives.
    let [begun, hangs] = unsafe {
        [&b"begun\0"[..], &b"hangs\0"[..]].map(|name| {
            let number = *library.get::<*mut c_int>(name).unwrap();
            AtomicI32::from_ptr(number)
        })
    };
    let give_up = || {
        let error = DmaConnectivity::nvlink(Some(&path), Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    };
    let deadline = Instant::now() + LONG;
    while begun.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < deadline, "NVML was not called");
        give_up();
    }
    for _ in 0..10 {
        give_up();
    }
    assert_eq!(begun.load(Ordering::SeqCst), 1);
    std::thread::scope(|scope| {
        let ask = || DmaConnectivity::nvlink(Some(&path), LONG).unwrap();
        let waiting = scope.spawn(ask);
        hangs.store(0, Ordering::SeqCst);
        assert_eq!(waiting.join().unwrap().bus_ids.len(), 4);
        // What has ended is not answered again.
        let before = begun.load(Ordering::SeqCst);
        assert_eq!(ask().bus_ids.len(), 4);
        assert_eq!(begun.load(Ordering::SeqCst), before + 1);
    });
}
