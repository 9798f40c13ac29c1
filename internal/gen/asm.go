package main

import (
	"fmt"
	"strings"
)

// Layout of a cuapi.List as the assembly reads it: the count, the function that
// exchanges the thread's capture mode or 0, the mode, then the calls, each a
// function, its number of arguments and their words.
const (
	listExch = 8
	listMode = 16
	listOps  = 24
	opArgs   = 16
	opSize   = opArgs + 8*maxArity
	opNargs  = 8
	codeBits = 16  // of runList's result; the index stands above them
	notFound = 500 // CUDA_ERROR_NOT_FOUND: the list names an absent entry point
	unknown  = 999 // CUDA_ERROR_UNKNOWN: a result that does not fit codeBits
)

func asmHead(tags string) string {
	return header + "//go:build " + tags + `

#include "textflag.h"

// runtime.cgocall calls these on the system stack as C functions: the block's
// address in the first argument register, the result in AX or R0. A callN
// block is the C function's address followed by its N argument words. Nothing
// is written back, because a callback into Go may have moved the block.

`
}

// address makes a trampoline's address known to Go, which cannot take the
// address of an assembly function without its wrapper.
func address(b *strings.Builder, name string) {
	fmt.Fprintf(b, "DATA ·%s(SB)/8, $%s<>(SB)\nGLOBL ·%s(SB), NOPTR|RODATA, $8\n\n", name, name, name)
}

func amd64File([]entry) string {
	var b strings.Builder
	b.WriteString(asmHead("linux && !android && !purecuda_portable"))
	regs := []string{"DI", "SI", "DX", "CX", "R8", "R9"} // System V
	for n := 0; n <= maxArity; n++ {
		fmt.Fprintf(&b, "TEXT call%d<>(SB), NOSPLIT|NOFRAME, $0\n\tMOVQ 0(DI), R11\n", n)
		stack := n - len(regs)
		frame := 0
		if stack > 0 {
			// The entry's stack is 8 off a multiple of 16.
			frame = (stack+1)/2*16 + 8
			fmt.Fprintf(&b, "\tSUBQ $%d, SP\n", frame)
			for i := range stack {
				fmt.Fprintf(&b, "\tMOVQ %d(DI), AX\n\tMOVQ AX, %d(SP)\n", 8*(1+len(regs)+i), 8*i)
			}
		}
		for i := min(n, len(regs)) - 1; i >= 0; i-- {
			fmt.Fprintf(&b, "\tMOVQ %d(DI), %s\n", 8*(1+i), regs[i])
		}
		if stack > 0 {
			fmt.Fprintf(&b, "\tCALL R11\n\tADDQ $%d, SP\n\tRET\n\n", frame)
		} else {
			b.WriteString("\tJMP R11\n\n")
		}
		address(&b, fmt.Sprintf("call%d", n))
	}
	fmt.Fprintf(&b, `// runList executes a cuapi.List and stops at the first call whose result, the
// low 32 bits, is not zero: it returns index<<%d | result, or 0.
TEXT runList<>(SB), NOSPLIT|NOFRAME, $0
	PUSHQ BX
	PUSHQ R12
	PUSHQ R13
	PUSHQ R14
	PUSHQ R15
	SUBQ $48, SP
	MOVQ 0(DI), R12
	LEAQ %d(DI), BX
	XORL R13, R13
	MOVQ DI, R14
	MOVQ %d(R14), R11
	TESTQ R11, R11
	JEQ  next
	LEAQ %d(R14), DI
	CALL R11
	TESTL AX, AX
	JNE  refused

next:
	CMPQ R13, R12
	JCC  done
	MOVL $%d, AX
	MOVQ 0(BX), R11
	TESTQ R11, R11
	JEQ  stop
	CMPQ %d(BX), $%d
	JLS  registers
`, codeBits, listOps, listExch, listMode, notFound, opNargs, len(regs))
	for i := len(regs); i < maxArity; i++ {
		fmt.Fprintf(&b, "\tMOVQ %d(BX), AX\n\tMOVQ AX, %d(SP)\n", opArgs+8*i, 8*(i-len(regs)))
	}
	b.WriteString("\nregisters:\n")
	for i, r := range regs {
		fmt.Fprintf(&b, "\tMOVQ %d(BX), %s\n", opArgs+8*i, r)
	}
	fmt.Fprintf(&b, `	CALL R11
	TESTL AX, AX
	JNE  stop
	INCQ R13
	ADDQ $%d, BX
	JMP  next

done:
	XORL AX, AX
	JMP  leave

stop:
	CMPL AX, $%d
	JLS  fits
	MOVL $%d, AX

fits:
	SHLL $%d, R13
	ORL  R13, AX

leave:
	MOVQ %d(R14), R11
	TESTQ R11, R11
	JEQ  return
	MOVL AX, R15
	LEAQ %d(R14), DI
	CALL R11
	MOVL R15, AX

return:
	ADDQ $48, SP
	POPQ R15
	POPQ R14
	POPQ R13
	POPQ R12
	POPQ BX
	RET

refused:
	CMPL AX, $%d
	JLS  return
	MOVL $%d, AX
	JMP  return

`, opSize, 1<<codeBits-1, unknown, codeBits, listExch, listMode, 1<<codeBits-1, unknown)
	address(&b, "runList")
	return strings.TrimSuffix(b.String(), "\n")
}

func arm64File([]entry) string {
	var b strings.Builder
	b.WriteString(asmHead("linux && !android && !purecuda_portable"))
	const regs = 8 // AAPCS64: R0 to R7, then 8 bytes of stack for each
	for n := 0; n <= maxArity; n++ {
		fmt.Fprintf(&b, "TEXT call%d<>(SB), NOSPLIT|NOFRAME, $0\n\tMOVD 0(R0), R9\n", n)
		stack := n - regs
		frame := (stack + 1) / 2 * 16
		if stack > 0 {
			fmt.Fprintf(&b, "\tSTP.W (R29, R30), -16(RSP)\n\tMOVD RSP, R29\n\tSUB $%d, RSP\n", frame)
			for i := range stack {
				fmt.Fprintf(&b, "\tMOVD %d(R0), R10\n\tMOVD R10, %d(RSP)\n", 8*(1+regs+i), 8*i)
			}
		}
		for i := min(n, regs) - 1; i >= 0; i-- {
			fmt.Fprintf(&b, "\tMOVD %d(R0), R%d\n", 8*(1+i), i)
		}
		if stack > 0 {
			fmt.Fprintf(&b, "\tCALL (R9)\n\tADD $%d, RSP\n\tLDP.P 16(RSP), (R29, R30)\n\tRET\n\n", frame)
		} else {
			b.WriteString("\tJMP (R9)\n\n")
		}
		address(&b, fmt.Sprintf("call%d", n))
	}
	fmt.Fprintf(&b, `// runList executes a cuapi.List and stops at the first call whose result, the
// low 32 bits, is not zero: it returns index<<%d | result, or 0.
TEXT runList<>(SB), NOSPLIT|NOFRAME, $0
	STP.W (R29, R30), -16(RSP)
	MOVD RSP, R29
	STP.W (R19, R20), -16(RSP)
	STP.W (R21, R22), -16(RSP)
	STP.W (R23, R24), -16(RSP)
	SUB  $32, RSP
	MOVD 0(R0), R20
	ADD  $%d, R0, R19
	MOVD ZR, R21
	MOVD R0, R22
	MOVD %d(R22), R9
	CBZ  R9, next
	ADD  $%d, R22, R0
	CALL (R9)
	MOVWU R0, R0
	CBNZ R0, refused

next:
	CMP  R20, R21
	BHS  done
	MOVD $%d, R0
	MOVD 0(R19), R9
	CBZ  R9, stop
	MOVD %d(R19), R10
	CMP  $%d, R10
	BLS  registers
`, codeBits, listOps, listExch, listMode, notFound, opNargs, regs)
	for i := regs; i < maxArity; i++ {
		fmt.Fprintf(&b, "\tMOVD %d(R19), R10\n\tMOVD R10, %d(RSP)\n", opArgs+8*i, 8*(i-regs))
	}
	b.WriteString("\nregisters:\n")
	for i := range regs {
		fmt.Fprintf(&b, "\tMOVD %d(R19), R%d\n", opArgs+8*i, i)
	}
	fmt.Fprintf(&b, `	CALL (R9)
	CBNZW R0, stop
	ADD  $1, R21
	ADD  $%d, R19
	B    next

done:
	MOVD ZR, R0
	B    leave

stop:
	MOVWU R0, R0
	LSR  $%d, R0, R10
	CBZ  R10, fits
	MOVD $%d, R0

fits:
	ORR  R21<<%d, R0

leave:
	MOVD %d(R22), R9
	CBZ  R9, return
	MOVD R0, R23
	ADD  $%d, R22, R0
	CALL (R9)
	MOVD R23, R0
	B    return

refused:
	LSR  $%d, R0, R10
	CBZ  R10, return
	MOVD $%d, R0

return:
	ADD  $32, RSP
	LDP.P 16(RSP), (R23, R24)
	LDP.P 16(RSP), (R21, R22)
	LDP.P 16(RSP), (R19, R20)
	LDP.P 16(RSP), (R29, R30)
	RET

`, opSize, codeBits, unknown, codeBits, listExch, listMode, codeBits, unknown)
	address(&b, "runList")
	return strings.TrimSuffix(b.String(), "\n")
}
