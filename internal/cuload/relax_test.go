//go:build linux && !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// A relaxed list changes its thread's capture mode first and last, wherever it
// stops; where the first change is refused nothing is called.
func TestRelaxedList(t *testing.T) {
	s, lib := openStub(t)
	defer collect()()
	const exchange = uint64(cuapi.IDThreadExchangeStreamCaptureMode)
	for n := 1; n <= cuapi.MaxList; n++ {
		for stop := -1; stop <= n; stop++ {
			for _, code := range codes {
				if (stop == n) != (code == cuapi.Success) {
					continue
				}
				l := cuapi.NewList()
				var calls [][]arg
				for i := range n {
					calls = append(calls, appendCall(l, cuapi.IDLaunchKernel, i))
				}
				l.Relax()
				seq := s.seq
				s.failAt, s.failCode = seq+uint64(stop)+2, uint64(code)
				got, r := lib.Table.Run(l)
				want, made := stop, uint64(min(stop+1, n)+2)
				if stop < 0 {
					want, made = 0, 1
				}
				if got != want || r != code {
					t.Errorf("%d calls, stop at %d with %v: %d, %v", n, stop, code, got, r)
				}
				if s.seq-seq != made {
					t.Errorf("%d calls, stop at %d: %d calls made, want %d", n, stop, s.seq-seq, made)
				}
				at := func(i uint64) record { return s.trace[(seq+1+i)%uint64(len(s.trace))] }
				first, last := at(0), at(made-1)
				if first.entry != exchange || last.entry != exchange || first.args[0] != last.args[0] || first.args[0] == 0 {
					t.Errorf("%d calls, stop at %d: from %s to %s", n, stop, cuapi.Entries[first.entry].Symbol(), cuapi.Entries[last.entry].Symbol())
				}
				for i := range uint64(max(0, int(made)-2)) {
					if err := check(at(1+i), cuapi.Entries[cuapi.IDLaunchKernel], calls[i]); err != nil {
						t.Errorf("%d calls, stop at %d: call %d: %v", n, stop, i, err)
					}
				}
				l.Free()
			}
		}
	}
	l := cuapi.NewList() // the pool's list has forgotten it
	appendCall(l, cuapi.IDEventRecord, 1)
	seq := s.seq
	s.failAt = 0
	if lib.Table.Run(l); s.seq != seq+1 {
		t.Errorf("%d calls by a list that is not relaxed", s.seq-seq)
	}
	l.Free()
	if s.misaligned != 0 {
		t.Errorf("%d calls came with a misaligned stack", s.misaligned)
	}
}
