//go:build !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"runtime"
)

// Sizes of the records that checkELF reads, for 64-bit ELF.
const (
	headerSize  = 64
	segmentSize = 56
)

var machine = map[string]elf.Machine{
	"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64, "loong64": elf.EM_LOONGARCH, "ppc64le": elf.EM_PPC64, "riscv64": elf.EM_RISCV,
}[runtime.GOARCH]

// checkELF tells why a file of this size is no shared library of this machine.
// It is also what keeps the dynamic linker from mapping segments that the file
// does not have, which would end the process with a bus error.
func checkELF(r io.ReaderAt, size int64) error {
	if size < headerSize {
		return &FileError{"not a shared library: the file is too short"}
	}
	var h [headerSize]byte
	if _, err := r.ReadAt(h[:], 0); err != nil {
		return reason(err)
	}
	le := binary.LittleEndian
	if string(h[:4]) != elf.ELFMAG {
		return &FileError{"not a shared library: no ELF header"}
	}
	if c := elf.Class(h[elf.EI_CLASS]); c != elf.ELFCLASS64 {
		return &FileError{fmt.Sprintf("wrong ELF class: %v, this process needs %v", c, elf.ELFCLASS64)}
	}
	if d := elf.Data(h[elf.EI_DATA]); d != elf.ELFDATA2LSB {
		return &FileError{fmt.Sprintf("wrong byte order: %v", d)}
	}
	if m := elf.Machine(le.Uint16(h[18:])); m != machine {
		return &FileError{fmt.Sprintf("wrong machine: %v, this process needs %v", m, machine)}
	}
	if t := elf.Type(le.Uint16(h[16:])); t != elf.ET_DYN {
		return &FileError{fmt.Sprintf("not a shared library: %v", t)}
	}
	offset, entry, count := le.Uint64(h[32:]), le.Uint16(h[54:]), le.Uint16(h[56:])
	if entry != segmentSize {
		return &FileError{"damaged: program headers of a wrong size"}
	}
	length := uint64(entry) * uint64(count)
	if offset > uint64(size) || length > uint64(size)-offset {
		return &FileError{"damaged: the file ends within its program headers"}
	}
	table := make([]byte, length)
	if _, err := r.ReadAt(table, int64(offset)); err != nil && err != io.EOF {
		return reason(err)
	}
	for ; len(table) > 0; table = table[segmentSize:] {
		start, n := le.Uint64(table[8:]), le.Uint64(table[32:])
		if elf.ProgType(le.Uint32(table)) == elf.PT_LOAD && (start > uint64(size) || n > uint64(size)-start) {
			return &FileError{"damaged: the file ends within a segment"}
		}
	}
	return nil
}
