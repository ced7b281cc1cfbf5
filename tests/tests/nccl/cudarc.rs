//! Tests cudarc with the simulator, which cudarc finds under the CUDA driver's usual name.

use super::groups::lines;
use super::run;
use rcomm_tests::simulator;

#[test]
fn slices_and_streams_of_cudarc_are_reduced_where_they_are() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(simulator::path(), folder.path().join("libcuda.so")).unwrap();
    let (_job, said) = run("cudarc", |_, command| {
        command.env("LD_LIBRARY_PATH", folder.path());
    });
    for said in said {
        assert!(said.contains("cudarc: sum 10"), "{said}");
        let refused = lines(&said, "refused:")[0];
        assert!(refused.contains("belongs to another context"), "{said}");
    }
}
