#!/bin/bash
# benchmarks/h200/lean.sh   Lean beside DDP and naive sparse training, from the root of the repository; ends after TOTAL_S (360).
# Parts, the most valuable first: A equal batch in fp32, C within 16 GiB at 10 Gbit/s, B equal batch in bf16.
# PARTS="C B" runs only these. Rows are printed as they come, and kept in $OUT/lean_A.md and so on; logs beside them.
: "${OUT:=/tmp/lean_out}"; mkdir -p "$OUT"
TOTAL_S=${TOTAL_S:-360}; PARTS=${PARTS:-"A C B"}
export PYTHONPATH=src:tests:carry/site:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
PY=${PY:-python3}; BACKEND=${BACKEND:-nccl}; HOSTS=${HOSTS:-4}
A=(qwen2.5-0.5b:4 gpt2-medium:8 vit_l_16:32 resnet152:128 --precision fp32 --steps 2
   --ways naive ddp lean bf16 dense recomputed-int8
   --buckets 12 vit_l_16=48 resnet152/lean=96 resnet152/bf16=96 resnet152/dense=96)
B=(qwen2.5-0.5b:8 gpt2-medium:8 vit_l_16:64 resnet152:128 --precision bf16 --steps 2
   --ways naive ddp lean recomputed-int8 bf16 dense
   --buckets 12 vit_l_16=48 resnet152/lean=96 resnet152/bf16=96 resnet152/dense=96)
C=(qwen2.5-0.5b gpt2-medium vit_l_16 resnet152 --precision bf16 --steps 3 --limit-gib 16
   --ways checkpoint lean bf16 recomputed-bf16 within --buckets 12
   --without qwen2.5-0.5b/lean gpt2-medium/lean vit_l_16/lean vit_l_16/recomputed-bf16 resnet152/bf16 resnet152/recomputed-bf16)

rows=$(mktemp -d)
cat > $rows/A.json <<'END'
{"for":{"precision":"fp32","ranks":4,"buckets":["12","vit_l_16=48","resnet152/lean=96","resnet152/bf16=96","resnet152/dense=96"],"limit_gib":16.0},"rows":{"qwen2.5-0.5b:4/naive":[4,17317904384],"qwen2.5-0.5b:4/ddp":[4,17317904384],"qwen2.5-0.5b:4/lean":[4,17317618176],"qwen2.5-0.5b:4/bf16":[4,16329695744],"qwen2.5-0.5b:4/dense":[4,15341773312],"qwen2.5-0.5b:4/recomputed-int8":[4,10429634304],"gpt2-medium:8/naive":[8,19735835648],"gpt2-medium:8/ddp":[8,19735835648],"gpt2-medium:8/lean":[8,19734549504],"gpt2-medium:8/bf16":[8,19025546240],"gpt2-medium:8/dense":[8,18316542976],"gpt2-medium:8/recomputed-int8":[8,7595732240],"vit_l_16:32/naive":[32,14436828672],"vit_l_16:32/ddp":[32,14432720384],"vit_l_16:32/lean":[32,14431438336],"vit_l_16:32/bf16":[32,13827528192],"vit_l_16:32/dense":[32,13219522048],"vit_l_16:32/recomputed-int8":[32,4108917984],"resnet152:128/naive":[128,23621187072],"resnet152:128/ddp":[128,23603553792],"resnet152:128/lean":[128,23611136256],"resnet152:128/bf16":[128,23499247488],"resnet152:128/dense":[128,23370974720],"resnet152:128/recomputed-int8":[128,9149728660]}}
END
cat > $rows/B.json <<'END'
{"for":{"precision":"bf16","ranks":4,"buckets":["12","vit_l_16=48","resnet152/lean=96","resnet152/bf16=96","resnet152/dense=96"],"limit_gib":16.0},"rows":{"qwen2.5-0.5b:8/naive":[8,23290781696],"qwen2.5-0.5b:8/ddp":[8,23290781696],"qwen2.5-0.5b:8/lean":[8,23290495488],"qwen2.5-0.5b:8/recomputed-int8":[8,14626748160],"qwen2.5-0.5b:8/bf16":[8,22302573056],"qwen2.5-0.5b:8/dense":[8,21314650624],"gpt2-medium:8/naive":[8,17615780864],"gpt2-medium:8/ddp":[8,17615780864],"gpt2-medium:8/lean":[8,17614494720],"gpt2-medium:8/recomputed-int8":[8,7899830032],"gpt2-medium:8/bf16":[8,16905491456],"gpt2-medium:8/dense":[8,16196488192],"vit_l_16:64/naive":[64,16377003520],"vit_l_16:64/ddp":[64,16372895232],"vit_l_16:64/lean":[64,16371613184],"vit_l_16:64/recomputed-int8":[64,5066797792],"vit_l_16:64/bf16":[64,15767703040],"vit_l_16:64/dense":[64,15159696896],"resnet152:128/naive":[128,12505874432],"resnet152:128/ddp":[128,12492959744],"resnet152:128/lean":[128,12500542208],"resnet152:128/recomputed-int8":[128,5133701524],"resnet152:128/bf16":[128,12388653440],"resnet152:128/dense":[128,12260380672]}}
END
cat > $rows/C.json <<'END'
{"for":{"precision":"bf16","ranks":4,"buckets":["12"],"limit_gib":16.0},"rows":{"qwen2.5-0.5b:0/checkpoint":[6,14136942592],"qwen2.5-0.5b:0/bf16":[4,15137104384],"qwen2.5-0.5b:0/recomputed-bf16":[8,15112991232],"qwen2.5-0.5b:0/within":[0,null],"gpt2-medium:0/checkpoint":[24,14554143744],"gpt2-medium:0/bf16":[7,15509920768],"gpt2-medium:0/recomputed-bf16":[29,15657798656],"gpt2-medium:0/within":[0,null],"vit_l_16:0/checkpoint":[359,14515276800],"vit_l_16:0/bf16":[64,15767703040],"vit_l_16:0/within":[0,null],"resnet152:0/checkpoint":[429,15556179456],"resnet152:0/lean":[164,15756666112],"resnet152:0/within":[0,null]}}
END

declare -A RATE=([A]=unshaped [B]=unshaped [C]=10gbit) MOST=([A]=175 [B]=110 [C]=170)
for part in $PARTS; do
  left=$((TOTAL_S - SECONDS)); (( left < 25 )) && { echo "no time for $part"; break; }
  declare -n options=$part; limit=$(( left < MOST[$part] ? left : MOST[$part] )); begun=$SECONDS
  timeout --kill-after=15 $limit $PY -m anabranch lab --hosts $HOSTS --rate ${RATE[$part]} --backend $BACKEND -- \
    $PY -m benchmarks.lean "${options[@]}" --network "${RATE[$part]}" --row-seconds 40 --predictions $rows/$part.json \
    2> >(grep --line-buffered -v -E "socket.cpp|^$" > "$OUT/lean_$part.log") | tee "$OUT/lean_$part.md"
  echo "part $part: $((SECONDS - begun)) s, exit ${PIPESTATUS[0]}"
done
tail -n 5 "$OUT"/lean_*.log
