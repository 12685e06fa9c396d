"""The checks that continuous integration runs on compiler output."""

import check_ptxas
import check_symbols

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z7forwardv' for 'sm_80'
ptxas info    : Function properties for _Z7forwardv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 528 bytes cmem[0]
"""
SPILLED = """\
ptxas info    : Compiling entry function '_Z8backwardv' for 'sm_90a'
ptxas info    : Function properties for _Z8backwardv
    64 bytes stack frame, 64 bytes spill stores, 72 bytes spill loads
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function "
    "'_Z8backwardv'\n"
)


class TestCheckPtxas:
    def test_counts_clean_kernels(self):
        assert check_ptxas.findings(CLEAN * 2) == (2, [])

    def test_names_the_kernel_that_spills(self):
        kernels, found = check_ptxas.findings(CLEAN + SPILLED)
        assert kernels == 2
        assert found == ["_Z8backwardv for sm_90a: 64 bytes spill stores, 72 bytes spill loads"]

    def test_known_spills_may_not_grow(self):
        name = "_Z15backward_kernelINS1_3F32ELi256EEv"
        log = SPILLED.replace("_Z8backwardv", name).replace("sm_90a", "sm_80")
        assert check_ptxas.findings(log) == (1, [])
        for other in (log.replace("64 bytes spill", "4096 bytes spill"), log.replace("_80", "_90")):
            _, found = check_ptxas.findings(other)
            assert len(found) == 1

    def test_finds_serialised_wgmma(self):
        _, found = check_ptxas.findings(CLEAN + SERIALISED)
        assert len(found) == 1
        assert "(C7510)" in found[0]

    def test_exit_status(self, tmp_path, capsys):
        log = tmp_path / "build.log"
        log.write_text(CLEAN)
        assert check_ptxas.main([str(log)]) == 0
        log.write_text(CLEAN + SERIALISED)
        assert check_ptxas.main([str(log)]) == 1
        assert "1 kernels, 1 findings" in capsys.readouterr().out


class TestCheckSymbols:
    def test_finds_shared_code_without_the_name_of_its_instruction_set(self):
        symbols = (
            "0000000000000000 T _ZN8jaxflash3cpu4avx27forwardEv\n"
            "0000000000000000 W _ZNSt6vectorIfSaIfEE9push_backEOf\n"
            "0000000000000000 t _ZL5localv\n"
        )
        found = check_symbols.foreign_symbols("avx2", symbols)
        assert found == ["_ZNSt6vectorIfSaIfEE9push_backEOf"]
