//! Tests links in a folder of dumps that are not followed: the job may be complete without what they lead to.

use crate::collect::read_archive;
use crate::program::{fixture, run};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Dumps of a healthy job, beside a link to a folder elsewhere and a link that leads nowhere.
fn dumps_and_links(dir: &Path) -> String {
    let (folder, elsewhere) = (dir.join("dumps"), dir.join("elsewhere"));
    fs::create_dir(&folder).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    let source = fixture("healthy-w4", "pickle");
    for name in ["rank_0", "rank_1", "rank_2", "rank_3"] {
        fs::copy(Path::new(&source).join(name), folder.join(name)).unwrap();
    }
    symlink(&elsewhere, folder.join("previous")).unwrap();
    symlink(dir.join("gone"), folder.join("latest")).unwrap();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn a_complete_job_beside_links_is_healthy() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dumps_and_links(dir.path());
    let analyzed = run(&["analyze", &folder]);
    assert_eq!(analyzed.code, Some(0), "{}", analyzed.stdout);
    let text: Vec<&str> = analyzed.stdout.split_whitespace().collect();
    let text = text.join(" ");
    for (link, why) in [
        ("previous", "it leads to a folder that is not searched"),
        ("latest", "No such file or directory"),
    ] {
        let note =
            format!("NOTE N300 {folder}/{link}: left aside: the link was not followed: {why}");
        assert!(text.contains(&note), "{text}");
    }
}

#[test]
fn a_link_that_collect_does_not_follow_is_a_note_and_no_absence() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dumps_and_links(dir.path());
    let archive = dir.path().join("job.rcap");
    let collected = run(&["collect", "-o", archive.to_str().unwrap(), &folder]);
    assert_eq!(collected.code, Some(0), "{}", collected.stderr);
    for link in ["previous", "latest"] {
        let note = format!("note: the link {folder}/{link} was not followed: ");
        assert!(collected.stderr.contains(&note), "{}", collected.stderr);
    }
    let (members, manifest) = read_archive(&archive);
    assert_eq!(members.len(), 4);
    assert_eq!(
        manifest["absent"].as_array().map(Vec::len),
        Some(0),
        "{manifest}"
    );
}
