#!/bin/bash
# benchmarks/h200/lean.sh   Lean beside DDP and naive sparse training, from the root of the repository; ends after TOTAL_S (270).
# Parts, the most valuable first: A equal batch in fp32, C within 16 GiB at 10 Gbit/s, B equal batch in bf16, D as C for two models
# more. PARTS="C B" runs only these. By default only the rows that the report of 2026-11-18 lacks, or that changed since: A about
# 40 s, C 115, B 115, D 45; WHOLE=1 runs all rows of A, B and C, in 175, 200 and 200 s. Rows are printed as they come, and kept in
# $OUT/lean_A.md and so on; logs beside.
# A rehearsal without a GPU, of a model of your own: ONLY=tools.bench.tiny_training:build BACKEND=gloo SITE= PY=.venv/bin/python
: "${OUT:=/tmp/lean_out}"; mkdir -p "$OUT"
TOTAL_S=${TOTAL_S:-270}; PARTS=${PARTS:-"A C B D"}; WHOLE=${WHOLE:-}; ONLY=${ONLY:-}
export PYTHONPATH=src:tests:${SITE-carry/site}:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
PY=${PY:-python3}; BACKEND=${BACKEND:-nccl}; HOSTS=${HOSTS:-4}
declare -A MODELS=([A]="resnet152:128" [B]="qwen2.5-0.5b:8 vit_l_16:64 resnet152:128 gpt2-medium:8"
  [C]="qwen2.5-0.5b resnet152" [D]="gpt2-medium vit_l_16")
declare -A WAYS=([A]="naive ddp lean bf16 dense recomputed-int8" [B]="naive ddp recomputed-int8 bf16 dense lean"
  [C]="checkpoint lean bf16 recomputed-bf16 within" [D]="bf16 within")
declare -A WITHOUT=([B]="$(echo {qwen2.5-0.5b,vit_l_16,resnet152}/{bf16,dense,lean})" [C]="qwen2.5-0.5b/lean")
declare -A RATE=([A]=unshaped [B]=unshaped [C]=10gbit [D]=10gbit) MOST=([A]=60 [B]=140 [C]=140 [D]=60)
if [ -n "$WHOLE" ]; then
  MODELS[A]="qwen2.5-0.5b:4 gpt2-medium:8 vit_l_16:32 resnet152:128"; MODELS[C]="qwen2.5-0.5b gpt2-medium vit_l_16 resnet152"
  WITHOUT=([C]="qwen2.5-0.5b/lean gpt2-medium/lean vit_l_16/lean vit_l_16/recomputed-bf16"); MOST=([A]=190 [B]=220 [C]=220)
  PARTS=${PARTS//D/}
fi
[ -n "$ONLY" ] && MODELS=([A]="$ONLY:4" [B]="$ONLY:4" [C]="$ONLY:4" [D]="$ONLY:4")
BUCKETS=(12 vit_l_16=48 resnet152=4)  # ResNet-152: with more, the first bucket's slot is there at the peak
A=(--precision fp32 --steps 2 --buckets "${BUCKETS[@]}")
B=(--precision bf16 --steps 2 --buckets "${BUCKETS[@]}")
C=(--precision bf16 --steps 3 --limit-gib 16 --buckets 12)
D=("${C[@]}")

rows=$(mktemp -d)
cat > $rows/A.json <<'END'
{"for":{"precision":"fp32","ranks":4,"buckets":["12","vit_l_16=48","resnet152=4"],"limit_gib":16.0},"rows":{"qwen2.5-0.5b:4/naive":[4,18724413440],"qwen2.5-0.5b:4/ddp":[4,18724413440],"qwen2.5-0.5b:4/lean":[4,18724127232],"qwen2.5-0.5b:4/bf16":[4,17736204800],"qwen2.5-0.5b:4/dense":[4,16748282368],"qwen2.5-0.5b:4/recomputed-int8":[4,10429634304],"gpt2-medium:8/naive":[8,19735835648],"gpt2-medium:8/ddp":[8,19735835648],"gpt2-medium:8/lean":[8,19734549504],"gpt2-medium:8/bf16":[8,19025546240],"gpt2-medium:8/dense":[8,18316542976],"gpt2-medium:8/recomputed-int8":[8,7595732240],"vit_l_16:32/naive":[32,14436828672],"vit_l_16:32/ddp":[32,14432720384],"vit_l_16:32/lean":[32,14431438336],"vit_l_16:32/bf16":[32,13827528192],"vit_l_16:32/dense":[32,13219522048],"vit_l_16:32/recomputed-int8":[32,4108917984],"resnet152:128/naive":[128,23621187072],"resnet152:128/ddp":[128,23603553792],"resnet152:128/lean":[128,23602944256],"resnet152:128/bf16":[128,23500492672],"resnet152:128/dense":[128,23380411904],"resnet152:128/recomputed-int8":[128,9105885076]}}
END
cat > $rows/B.json <<'END'
{"for":{"precision":"bf16","ranks":4,"buckets":["12","vit_l_16=48","resnet152=4"],"limit_gib":16.0},"rows":{"qwen2.5-0.5b:8/naive":[8,22988791808],"qwen2.5-0.5b:8/ddp":[8,22988791808],"qwen2.5-0.5b:8/lean":[8,22988505600],"qwen2.5-0.5b:8/recomputed-int8":[8,14626748160],"qwen2.5-0.5b:8/bf16":[8,22000583168],"qwen2.5-0.5b:8/dense":[8,21012660736],"gpt2-medium:8/naive":[8,17615780864],"gpt2-medium:8/ddp":[8,17615780864],"gpt2-medium:8/lean":[8,17614494720],"gpt2-medium:8/recomputed-int8":[8,7899830032],"gpt2-medium:8/bf16":[8,16905491456],"gpt2-medium:8/dense":[8,16196488192],"vit_l_16:64/naive":[64,16377003520],"vit_l_16:64/ddp":[64,16372895232],"vit_l_16:64/lean":[64,16371613184],"vit_l_16:64/recomputed-int8":[64,5066797792],"vit_l_16:64/bf16":[64,15767703040],"vit_l_16:64/dense":[64,15159696896],"resnet152:128/naive":[128,12505874432],"resnet152:128/ddp":[128,12492959744],"resnet152:128/lean":[128,12492350208],"resnet152:128/recomputed-int8":[128,5104079252],"resnet152:128/bf16":[128,12388391296],"resnet152:128/dense":[128,12265099264]}}
END
cat > $rows/C.json <<'END'
{"for":{"precision":"bf16","ranks":4,"buckets":["12"],"limit_gib":16.0},"rows":{"qwen2.5-0.5b:0/checkpoint":[6,14136942592],"qwen2.5-0.5b:0/bf16":[4,14986109440],"qwen2.5-0.5b:0/recomputed-bf16":[8,15112991232],"qwen2.5-0.5b:0/within":[0,null],"gpt2-medium:0/checkpoint":[24,14554143744],"gpt2-medium:0/bf16":[7,15509920768],"gpt2-medium:0/recomputed-bf16":[29,15657798656],"gpt2-medium:0/within":[0,null],"vit_l_16:0/checkpoint":[359,14515276800],"vit_l_16:0/bf16":[64,15767703040],"vit_l_16:0/within":[0,null],"resnet152:0/checkpoint":[429,15556179456],"resnet152:0/lean":[164,15756666112],"resnet152:0/within":[0,null],"resnet152:0/bf16":[165,15770745728],"resnet152:0/recomputed-bf16":[437,15797804928]}}
END
cp $rows/C.json $rows/D.json

for part in $PARTS; do
  left=$((TOTAL_S - SECONDS)); (( left < 25 )) && { echo "no time for $part"; break; }
  declare -n options=$part; limit=$(( left < MOST[$part] ? left : MOST[$part] )); begun=$SECONDS
  timeout --kill-after=15 $limit $PY -m anabranch lab --hosts $HOSTS --rate ${RATE[$part]} --backend $BACKEND -- \
    $PY -m benchmarks.lean ${MODELS[$part]} --ways ${WAYS[$part]} --without ${WITHOUT[$part]} "${options[@]}" \
    --network "${RATE[$part]}" --row-seconds 40 --predictions $rows/$part.json \
    2> >(grep --line-buffered -v -E "socket.cpp|^$" > "$OUT/lean_$part.log") | tee "$OUT/lean_$part.md"
  echo "part $part: $((SECONDS - begun)) s, exit ${PIPESTATUS[0]}"
done
tail -n 5 "$OUT"/lean_*.log
