//! Tests buffers of cudarc with the simulator, which cudarc finds under the CUDA driver's usual name.

use super::groups::lines;
use super::run;
use rcomm_tests::simulator;

#[test]
fn slices_of_cudarc_are_reduced_in_place_on_its_streams() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(simulator::path(), folder.path().join("libcuda.so")).unwrap();
    let (_job, outputs) = run("cudarc", |_, command| {
        command.env("LD_LIBRARY_PATH", folder.path());
    });
    for output in outputs {
        assert!(output.contains("cudarc: sum 10"), "{output}");
        let refused = lines(&output, "refused:")[0];
        assert!(refused.contains("belongs to another context"), "{output}");
    }
}
